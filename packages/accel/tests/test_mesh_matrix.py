"""The table of the guide on parallelism: combinations of axes and models on four ranks against one process.

``pytest -s --all packages/accel/tests/test_mesh_matrix.py`` prints it.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from mesh_matrix import Case, deviation, plain_step, steps_and_refusals

from accel_state.testing import run_world

pytestmark = [
    pytest.mark.skipif(find_spec("transformers") is None, reason="the models are those of transformers"),
    pytest.mark.timeout(900),
    pytest.mark.slow,  # 60 models in four ranks; test_mesh_tp_sequence.py has a few of them
]

GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "parallelism.md"
BOUND = 1e-5
KEPT = {"reshard_after_forward": False}
ZERO_BUBBLE = {"pipeline": {"schedule": "interleaved_zero_bubble"}, "note": "interleaved_zero_bubble"}
RECOMPUTED = {"activation_checkpointing": True}
ZBV, DUALPIPEV = ({"pipeline": {"schedule": name}, "note": name} for name in ("zbv", "dualpipev"))
TWICE = {"window": 2, "note": "2 micro-batches"}

CASES = [
    Case("dp_replicate 4", "llama"),
    Case("dp_shard 4", "llama"),
    Case("dp_shard 4", "gpt2", fsdp=RECOMPUTED, note="recomputed"),
    Case("dp_replicate 2 x dp_shard 2", "gpt2", **TWICE),
    Case("tp 4", "llama"),
    Case("tp 4", "llama", length=9, note="9 tokens"),
    Case("tp 4", "gpt2", length=3, note="3 tokens"),
    Case("tp 4", "tied llama"),
    Case("tp 4", "llama", mesh={"tp_sequence_parallel": False}, note="whole hidden states"),
    Case("dp_shard 2 x tp 2", "llama", length=7, note="7 tokens"),
    Case("dp_shard 2 x tp 2", "gpt2", fsdp=RECOMPUTED, window=2, note="recomputed, 2 micro-batches"),
    Case("dp_shard 2 x tp 2", "tied llama", fsdp=RECOMPUTED, note="recomputed"),
    Case("dp_shard 2 x tp 2", "qwen"),
    Case("dp_shard 2 x tp 2", "qwen2"),
    Case("dp_shard 2 x tp 2", "mistral"),
    Case("dp_shard 2 x tp 2", "gemma"),
    Case("dp_shard 2 x tp 2", "gemma2", length=5, note="5 tokens"),
    Case("dp_shard 2 x tp 2", "phi"),
    Case("dp_replicate 2 x tp 2", "llama"),
    Case("dp_replicate 2 x tp 2", "gpt2", **TWICE),
    Case("dp_replicate 2 x tp 2", "gemma2"),
    Case("dp_replicate 2 x tp 2", "tied llama"),
    Case("cp 4", "llama", length=16),
    Case("cp 2 x tp 2", "llama"),
    Case("cp 2 x tp 2", "gpt2", length=12),
    Case("dp_shard 2 x cp 2", "gpt2"),
    Case("dp_replicate 2 x cp 2", "llama"),
    Case("sp 4", "gpt2"),
    Case("sp 2 x tp 2", "llama"),
    Case("dp_shard 2 x sp 2", "llama", fsdp=RECOMPUTED, note="recomputed"),
    Case("pp 2 x tp 2", "deep llama"),
    Case("pp 2 x tp 2", "deep llama", fsdp=RECOMPUTED, pipeline={"schedule": "interleaved1f1b"}, note="interleaved"),
    Case("pp 2 x tp 2", "gpt2", length=7, note="7 tokens"),
    Case("pp 2 x tp 2", "tied llama", **TWICE),
    Case("pp 2 x dp_shard 2", "gpt2", pipeline={"schedule": "gpipe"}, note="gpipe"),
    Case("pp 2 x dp_shard 2", "llama", fsdp=RECOMPUTED, note="recomputed"),
    Case("pp 2 x dp_replicate 2", "qwen"),
    Case("pp 2 x dp_shard 2", "deep llama", fsdp=KEPT, **ZERO_BUBBLE),
    Case("pp 2 x dp_replicate 2", "deep llama", fsdp=KEPT, window=2, **ZERO_BUBBLE),
    Case("pp 2 x tp 2", "deep llama", **ZERO_BUBBLE),
    Case("pp 2 x tp 2", "deep llama", **ZBV),
    Case("pp 2 x dp_shard 2", "deep llama", fsdp=KEPT, **ZBV),
    Case("pp 2 x tp 2", "deep llama", length=7, **DUALPIPEV),
    Case("pp 2 x dp_replicate 2", "deep llama", fsdp=KEPT, window=2, **DUALPIPEV),
    Case("pp 2 x cp 2", "llama"),
    Case("pp 2 x cp 2", "gpt2", length=12, pipeline={"schedule": "gpipe"}, note="gpipe"),
    Case("pp 2 x cp 2", "tied llama", **TWICE),
    Case("pp 2 x cp 2", "qwen"),
    Case("pp 2 x cp 2", "deep llama", fsdp=RECOMPUTED, pipeline={"schedule": "interleaved1f1b"}, note="interleaved"),
    Case("pp 2 x cp 2", "deep llama", fsdp=KEPT, **ZERO_BUBBLE),
    Case("pp 2 x cp 2", "deep llama", fsdp=KEPT, **ZBV),
    Case("pp 2 x cp 2", "deep llama", fsdp=KEPT, length=4, **DUALPIPEV),
    Case("pp 2 x sp 2", "llama"),
    Case("pp 2 x sp 2", "gpt2", length=6, pipeline={"schedule": "gpipe"}, note="gpipe"),
    Case("pp 2 x sp 2", "tied llama", **TWICE),
    Case("pp 2 x sp 2", "qwen"),
    Case("pp 2 x sp 2", "deep llama", fsdp=RECOMPUTED, pipeline={"schedule": "interleaved1f1b"}, note="interleaved"),
    Case("pp 2 x sp 2", "deep llama", fsdp=KEPT, **ZERO_BUBBLE),
    Case("pp 2 x sp 2", "deep llama", fsdp=KEPT, **ZBV),
    Case("pp 2 x sp 2", "deep llama", fsdp=KEPT, length=6, **DUALPIPEV),
]
REFUSED = [
    Case("cp 2 x sp 2", "llama"),
    Case("dp_shard 2 x sp 2 x ep 2", "llama"),
    Case("dp_shard 4 x ep 3", "llama"),
    Case("dp_shard 4 x ep 2", "llama"),
    Case("tp 4", "qwen"),
    Case("tp 4", "phi", mesh={"tp_sequence_parallel": True}, note="sharded hidden states"),
    Case("cp 4", "llama", length=12, note="12 tokens"),
    Case("sp 4", "llama", length=10, note="10 tokens"),
    Case("pp 4", "llama"),
    Case("pp 2 x tp 2", "deep llama", pipeline={"num_microbatches": 1}, note="1 micro-batch"),
    Case("pp 2 x tp 2", "deep llama", pipeline={"num_microbatches": 3}, note="3 micro-batches of 8 samples"),
    Case("pp 2 x dp_shard 2", "deep llama", **ZERO_BUBBLE),
    Case("pp 2 x dp_shard 2", "deep llama", **ZBV),
    Case(
        "pp 2 x dp_shard 2",
        "deep llama",
        fsdp=KEPT | RECOMPUTED,
        pipeline=DUALPIPEV["pipeline"],
        note="dualpipev, recomputed",
    ),
    Case("pp 2 x tp 2", "deep tied llama", **ZBV),
    Case(
        "pp 2 x tp 2",
        "deep llama",
        pipeline={"schedule": "dualpipev", "num_microbatches": 2},
        note="dualpipev, 2 micro-batches",
    ),
]


HEADS = ("| mesh | model | | largest relative deviation |", "| mesh | model | | refused, because |")


def cells_of(lines: list[str]) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def documented(head: str) -> list[list[str]]:
    table = GUIDE.read_text(encoding="utf-8").split(head + "\n")[1].split("\n\n")[0]
    return cells_of(table.splitlines()[1:])


def test_every_combination_is_one_process_or_is_refused_as_the_guide_says() -> None:
    ranks = run_world(steps_and_refusals, 4, CASES, REFUSED, timeout=800)
    results, reasons = ranks[0]
    tables: tuple[list[str], list[str]] = ([], [])
    for case, found in zip(CASES, results, strict=True):
        figure = deviation(found, plain_step(case))
        assert figure < BOUND, (case, figure)
        tables[0].append(f"| {case.axes} | {case.kind} | {case.note} | {figure:.1e} |")
    for case, reason in zip(REFUSED, reasons, strict=True):
        tables[1].append(f"| {case.axes} | {case.kind} | {case.note} | {reason} |")
    for head, lines in zip(HEADS, tables, strict=True):
        print("\n".join(["", head, "| --- | --- | --- | --- |", *lines]))
    assert all(refusals == reasons for _, refusals in ranks), "all ranks are told the same"
    rows = documented(HEADS[0])
    assert [row[:-1] for row in rows] == [row[:-1] for row in cells_of(tables[0])], "print the table again"
    assert all(float(row[-1]) < BOUND for row in rows)
    assert documented(HEADS[1]) == cells_of(tables[1]), "print the table again"

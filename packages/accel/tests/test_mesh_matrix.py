"""The table of the guide on parallelism: combinations of axes and models on four ranks against one process.

``pytest -s --all packages/accel/tests/test_mesh_matrix.py`` prints it.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from mesh_matrix import Case, deviation, mesh_steps, plain_step

from accel_state.testing import run_world

pytestmark = [
    pytest.mark.skipif(find_spec("transformers") is None, reason="the models are those of transformers"),
    pytest.mark.timeout(900),
    pytest.mark.slow,  # 36 models in four ranks; test_mesh_tp_sequence.py has a few of them
]

GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "parallelism.md"
BOUND = 1e-5
KEPT = {"reshard_after_forward": False}
ZERO_BUBBLE = {"pipeline": {"schedule": "interleaved_zero_bubble"}, "note": "interleaved_zero_bubble"}
RECOMPUTED = {"activation_checkpointing": True}
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
]


def rows_of(lines: list[str]) -> dict[tuple[str, ...], float]:
    """The rows of a table by all columns but the last."""
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {tuple(row[:-1]): float(row[-1]) for row in cells}


def test_every_combination_is_one_process_as_the_guide_says() -> None:
    results = run_world(mesh_steps, 4, CASES, timeout=800)[0]
    lines = []
    for case, found in zip(CASES, results, strict=True):
        figure = deviation(found, plain_step(case))
        assert figure < BOUND, (case, figure)
        lines.append(f"| {case.axes} | {case.kind} | {case.note} | {figure:.1e} |")
    print("\n".join(["| mesh | model | | largest relative deviation |", "| --- | --- | --- | --- |", *lines]))
    text = GUIDE.read_text(encoding="utf-8").split("| mesh | model | | largest relative deviation |\n")[1]
    printed = text.split("\n\n")[0].splitlines()[1:]
    documented = rows_of(printed)
    assert list(documented) == list(rows_of(lines)), "print the table again"
    assert all(figure < BOUND for figure in documented.values())

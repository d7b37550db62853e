"""The table of the guide on fine-tuning: adapters, 4-bit weights and Muon on several ranks against one process.

``pytest -s --all packages/accel/tests/test_fine_tuning.py`` prints it.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from fine_tuning import Case, deviation, plain, run_cases

from accel_state.testing import run_world

pytestmark = [
    pytest.mark.skipif(find_spec("transformers") is None, reason="the models are those of transformers"),
    pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="4-bit weights are those of bitsandbytes"),
    pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch.optim.Muon came with torch 2.9"),
    pytest.mark.timeout(900),
    pytest.mark.slow,  # 13 trainings in 2 and 4 ranks; test_muon.py and test_frozen_weights.py have fast ones
]

GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "fine-tuning.md"
HEAD = "| trained | ranks | largest relative deviation | weights a rank | optimizer state a rank |"
BOUND = 1e-5
NAMES = {"lora": "LoRA", "qlora": "QLoRA", "muon": "Muon and AdamW, float64"}

CASES = [
    Case("lora", 2),
    Case("lora", 2, {"dp_shard_size": 2}),
    Case("lora", 4, {"dp_replicate_size": 2, "dp_shard_size": 2}),
    Case("qlora", 2, storage="uint8"),
    Case("qlora", 2, {"dp_shard_size": 2}, "float32"),
    Case("qlora", 2, {"dp_shard_size": 2}, "uint8"),
    Case("qlora", 2, {"dp_shard_size": 2}, "bfloat16"),
    Case("qlora", 4, {"dp_shard_size": 4}, "uint8"),
    *(
        [
            Case("qlora", 2, storage="NF4Tensor"),
            Case("qlora", 2, {"dp_shard_size": 2}, "NF4Tensor"),
            Case("qlora", 4, {"dp_shard_size": 4}, "NF4Tensor"),
        ]
        if find_spec("torchao") is not None
        else []
    ),
    Case("muon", 2, dtype="float64"),
    Case("muon", 2, {"dp_shard_size": 2}, dtype="float64"),
    Case("muon", 2, {"tp_size": 2}, dtype="float64"),
    Case("muon", 4, {"dp_shard_size": 4}, dtype="float64"),
    Case("muon", 4, {"dp_shard_size": 2, "tp_size": 2}, dtype="float64"),
]


def label(case: Case) -> tuple[str, str]:
    storage = f", 4 bits stored as {case.storage}" if case.storage else ""
    if case.storage == "NF4Tensor":
        storage = ", NF4 of torchao"
    mesh = " x ".join(f"{axis.removesuffix('_size')} {size}" for axis, size in case.where.items()) or "DDP"
    return NAMES[case.what] + storage, f"{case.ranks}: {mesh}"


def row(case: Case, ranks: list[dict[str, Any]], figure: float) -> str:
    weights, states = (max(rank[key] for rank in ranks) / 2**10 for key in ("weight bytes", "state bytes"))
    what, where = label(case)
    return f"| {what} | {where} | {figure:.0e} | {weights:.0f} KiB | {states:.0f} KiB |"


def test_every_combination_is_one_process_as_the_guide_says() -> None:
    lines: dict[tuple[str, str], str] = {}
    for world in (2, 4):
        cases = [case for case in CASES if case.ranks == world]
        results = run_world(run_cases, world, cases, timeout=800)
        for number, case in enumerate(cases):
            ranks = [found[number] for found in results]
            expected = plain(case)
            figure = max(deviation(rank, expected) for rank in ranks)
            assert figure < BOUND, (case, figure)
            if case.what == "qlora" and case.where:
                # 4 bits for each of the weights of two blocks, and each of them on one rank.
                # torchao's scales are among the bytes: 8 bits for 64 weights, 32 for 16 of these, and 68 bytes.
                elements, layers = 2 * (4 * 64 * 64 + 3 * 64 * 128), 2 * 7
                scales = elements // 64 + 4 * elements // 1024 + 68 * layers if case.storage == "NF4Tensor" else 0
                assert sum(rank["base bytes"] for rank in ranks) == elements // 2 + scales
            lines[label(case)] = row(case, ranks, figure)
    print("\n".join([HEAD, "| --- | --- | --- | ---: | ---: |", *(lines[label(case)] for case in CASES)]))
    text = GUIDE.read_text(encoding="utf-8").split(HEAD + "\n")[1].split("\n\n")[0]
    documented = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()[1:]]
    documented = [cells for cells in documented if find_spec("torchao") or "torchao" not in cells[0]]
    printed = [[cell.strip() for cell in lines[label(case)].strip("|").split("|")] for case in CASES]
    assert [[*cells[:2], *cells[3:]] for cells in documented] == [[*cells[:2], *cells[3:]] for cells in printed]
    assert all(float(cells[2]) < BOUND for cells in documented)

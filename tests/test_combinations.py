"""benchmarks/combinations.py: its draws, its verdicts, and a small fixed draw of combinations against one process."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmark_modules import BENCHMARKS, loaded_benchmark

pytestmark = pytest.mark.skipif(find_spec("transformers") is None, reason="the models are those of transformers")


@pytest.fixture
def combinations(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    with loaded_benchmark("combinations", monkeypatch) as module:
        yield module


def test_draws_follow_from_the_seed_and_their_number(combinations: Any) -> None:
    draws = [combinations.draw_of(35, number) for number in range(800)]
    assert draws[7] == combinations.draw_of(35, 7) != combinations.draw_of(36, 7)
    setups = (*combinations.SETUPS.values(), *combinations.EXPERT_SETUPS.values())
    assert {draw.setup.name for draw in draws} == {name for names in setups for name in names}
    assert {feature for draw in draws for feature in draw.features} == set(combinations.FEATURES)
    assert {draw.precision for draw in draws} == {"no", "bf16", "fp8"}
    assert sum(draw.resumes_under is not None for draw in draws) > 20


def test_a_draw_is_equal_or_refused_on_all_ranks_or_neither(combinations: Any) -> None:
    draw = combinations.draw_of(35, 0)
    weights = {"0.weight": torch.ones(2)}

    def kind(*ranks: Any) -> str:
        reference = combinations.Found([1.0], [2.0], weights)
        return combinations.verdict(combinations.replace(draw, precision="no"), [list(ranks)], reference)["kind"]

    equal = combinations.Found([1.0 + 1e-6], [2.0], weights)
    assert kind(equal, equal) == "equal"
    assert kind(combinations.Found([1.001], [2.0], weights)) == "different"
    assert kind(combinations.Found([float("nan")], [2.0], weights)) == "different"
    assert kind(combinations.Found([1.0, 1.0], [2.0], weights)) == "different"
    assert kind(combinations.Found([1.0], [2.0], {"0.weight": torch.ones(2) + 1e-3})) == "different"
    assert kind(combinations.Found([1.0], [2.0], {"0.other": torch.ones(2)})) == "different"
    refused = combinations.Found(refused="cp_size=2 ...")
    assert kind(refused, refused) == "refused"
    assert kind(equal, refused) == "error"
    assert kind(refused, combinations.Found(error="Traceback ...")) == "error"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_drawn_combinations_are_those_of_one_process_or_refused(tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    command = [sys.executable, str(BENCHMARKS / "combinations.py"), "--draws", "16", "--batch", "16"]
    done = subprocess.run(
        [*command, "--results", str(results)], capture_output=True, text=True, timeout=800, check=False
    )
    assert done.returncode == 0, done.stdout
    kinds = [json.loads(line)["kind"] for line in results.read_text().splitlines()]
    assert len(kinds) == 16 and kinds.count("equal") > 8

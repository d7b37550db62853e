"""benchmarks/bigmodel_architectures.py: its verdicts, and a small fixed draw of it."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmark_modules import BENCHMARKS, loaded_benchmark
from torch import nn

from accel_state.errors import ConfigurationError


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_VERBOSITY", "HF_HUB_DISABLE_PROGRESS_BARS"):
        monkeypatch.setenv(name, "1" if name.startswith("HF") else "error")
    with loaded_benchmark("bigmodel_architectures", monkeypatch) as module:
        yield module


class Small(nn.Module):
    """With the method of Transformers' and diffusers' models that writes a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))

    def save_pretrained(self, folder: Path) -> None:
        from safetensors.torch import save_file

        folder.mkdir()
        save_file(self.state_dict(), folder / "model.safetensors")


@pytest.fixture
def row(bench: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    architecture = replace(bench.ARCHITECTURES[0], inputs=lambda rng: {"x": torch.randn(2, 4, generator=rng)})
    monkeypatch.setattr(type(architecture), "build", lambda self: Small().eval())
    return bench.Row(architecture, 0)


def test_at_least_60_architectures_of_both_libraries(bench: Any) -> None:
    names = [architecture.name for architecture in bench.ARCHITECTURES]
    assert len(names) == len(set(names)) >= 60
    assert {architecture.library for architecture in bench.ARCHITECTURES} == {"transformers", "diffusers"}


def test_each_way_is_compared_with_the_plain_model(
    bench: Any, row: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert bench.half_on_disk(row.plain) == {"first": "disk", "second": "cpu"}

    def wrong(model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        with torch.no_grad():
            model.second.weight[0, 0] += 0.01
        return model

    def refused(*args: Any, **kwargs: Any) -> None:
        raise ConfigurationError("first\nsecond")

    def raised(*args: Any, **kwargs: Any) -> None:
        raise ValueError("first\nsecond")

    monkeypatch.setattr(bench, "cpu_offload", wrong)
    monkeypatch.setattr(bench, "disk_offload", refused)
    monkeypatch.setattr(bench, "dispatch_model", raised)
    found = row.verdicts(tmp_path)
    assert found["cpu"].startswith("forward: error") and found["threads"].startswith("forward: error")
    assert (found["disk"], found["map"]) == ("refused ConfigurationError: first", "raised ValueError: first")
    assert found["load"] == bench.EQUAL
    assert [bench.short(found[way]) for way in bench.WAYS] == ["differs", "refused", "raised", "equal", "differs"]
    assert not any(bench.is_right({way: text}) for way, text in found.items() if way != "load")
    assert bench.is_right({"cpu": "equal", "threads": bench.NOT_SHARED}) and not bench.is_right(
        {"cpu": "plain differs"}
    )


def test_differences_are_relative_to_the_largest_value_and_exact_for_tokens(bench: Any) -> None:
    one = torch.tensor([1000.0, 1.0])
    assert bench.difference([one], [one + 0.005]) == ""
    assert bench.difference([one], [one + 0.05]) == "error 5.0e-02"
    assert bench.difference([one * torch.nan], [one]) == "error nan"
    assert bench.difference([one], [one[:1]]) == "shapes [(2,)]"
    assert bench.difference([torch.tensor([3, 4])], [torch.tensor([3, 5])]) == "1 of 2 differ"
    assert len(list(bench.tensors_of({"a": (one, [one]), "b": None}))) == 2


def test_a_plain_model_that_is_not_repeatable_is_a_mistake(bench: Any, row: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(Small, "forward", lambda self, x: torch.empty_like(x).normal_(generator=torch.Generator()))
    bench.Row(row.architecture, 0)  # the same numbers each time
    endless = torch.Generator()
    monkeypatch.setattr(Small, "forward", lambda self, x: torch.empty_like(x).normal_(generator=endless))
    with pytest.raises(RuntimeError, match="forward gives something else when it is repeated"):
        bench.Row(row.architecture, 0)
    monkeypatch.setattr(Small, "forward", lambda self, x: x / 0)
    with pytest.raises(RuntimeError, match="forward is not finite"):
        bench.Row(row.architecture, 0)


# Builds six models of Transformers in processes of their own; the whole table takes 10 minutes.
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="the models are those of transformers")
def test_a_draw_of_architectures_is_equal() -> None:
    command = [sys.executable, str(BENCHMARKS / "bigmodel_architectures.py"), "--draw", "6", "--seed", "50"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-1000:]}"

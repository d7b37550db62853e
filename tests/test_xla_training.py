"""Training on one XLA device, that of a CPU, equals plain PyTorch, and everything of the Accelerator works there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import xla_runs
from forks import call_alone

pytest.importorskip("torch_xla", reason="scripts/test-xla makes an environment with torch_xla")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # compiles the graphs of all runs, for 15 s
# XLA compiles for much longer than these graphs run. The example, in test_xla_launch.py, is compiled as by default.
QUICKLY = "--xla_backend_optimization_level=0"


def run(name: str, folder: Path, **variables: str) -> dict[str, Any]:
    """The results of a run of xla_runs.py."""
    environment = {"PJRT_DEVICE": "CPU", "XLA_FLAGS": QUICKLY, **variables}
    results: dict[str, Any] = call_alone(xla_runs.results_of, name, str(folder), seconds=580, **environment)
    return results


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("xla")


@pytest.fixture(scope="module")
def results(folder) -> dict[str, Any]:
    # With the variable a single replica reduces as several do.
    return run("single", folder, XLA_ALWAYS_ALLREDUCE="1")


def test_one_process_is_an_xla_run(results) -> None:
    assert (results["type"], results["device"]) == ("XLA", "xla:0")


@pytest.mark.parametrize("example", ["digits", "text"])
def test_losses_equal_plain_pytorch(results, example) -> None:
    run = results[example]
    assert len(run["losses"]) == 20
    torch.testing.assert_close(run["losses"], run["expected"], rtol=1e-4, atol=1e-5)


def test_a_step_is_one_graph_compiled_twice(results) -> None:
    """From the third step on: a cut for each, no compilation, and no copy to the host."""
    assert results["digits"]["later"] == {"compilations": 0, "cuts": 18, "copies": 0}
    # Micro-batches: a cut for each, and windows of two, so everything is compiled after two windows.
    assert results["text"]["later"] == {"compilations": 0, "cuts": 16, "copies": 0}


def test_an_evaluation_ends_a_graph_with_each_batch(results) -> None:
    digits = results["digits"]
    assert digits["evaluation"]["cuts"] == digits["batches"] == 12 and digits["evaluation"]["copies"] == 0
    assert digits["samples"] == 360 and digits["right"][0] == digits["right"][1]
    (said,) = digits["said"]
    assert "The last batch has 8 of 32 samples" in said and "drop_last=True" in said


def test_a_resumed_run_draws_the_same_dropout(results) -> None:
    run = results["resume"]
    assert run["resumed"] == run["whole"][3:] and run["tied"]


def test_files_are_those_of_any_device(results, folder) -> None:
    from safetensors.torch import load_file

    weights = torch.load(folder / "weights.pt")
    assert set(load_file(folder / "model" / "model.safetensors")) == {"table.weight"}
    torch.testing.assert_close(
        load_file(folder / "model" / "model.safetensors")["table.weight"], weights["table.weight"]
    )
    pickled = torch.load(folder / "pickled" / "pytorch_model.bin")
    assert {value.device.type for value in pickled.values()} == {"cpu"}
    assert set(pickled) == {"table.weight", "head.weight"}


def test_communication_and_loaders(results) -> None:
    offers = results["offers"]
    assert offers["gather"] == [[1, 1], [True]] and offers["reduce"] == [3, 3] and offers["padded"] == [2]
    assert offers["objects"] == [[1], [2], [1, 1]] and offers["split"] == [1, 2, 3]
    assert offers["trigger"] == [True, False]
    assert offers["stream"] == [[4, 0, 1, 2, 3], [4, 4, 5, 6]], "the batch keeps its shape, the metrics their samples"
    assert offers["skipped"] == [[4, 5]] and offers["dropped"] == [[0, 1]]


def test_compilation_profiler_and_precision(results) -> None:
    offers = results["offers"]
    assert offers["profiled"] and offers["compiled"] < 1e-6
    inside, output, weight, difference = offers["bf16"]
    assert (inside, output, weight) == ("torch.bfloat16", "torch.float32", "torch.float32") and 0 < difference < 0.02


def test_moving_averages_equal_those_of_torch(results) -> None:
    assert results["averages"]["difference"] < 1e-6
    assert results["averages"]["later"]["compilations"] == results["averages"]["later"]["copies"] == 0


def test_what_would_train_nothing_or_compile_always_is_told(results) -> None:
    (message,) = results["offers"]["recompiled"]
    assert "training steps were recompiled" in message and "Pad all batches" in message
    assert "holds a parameter of shape (1, 2) on cpu" in results["offers"]["stale"]


def test_a_replica_reduces_in_the_graph(results) -> None:
    offers = results["offers"]
    assert offers["replica"] == [[[1, 1]], [1, 1], [True, False], [{"x": 1}], "y", None]
    alone, reductions, gradient = offers["averaged"]
    assert alone == 0 and reductions == 2 and gradient == [[2, 2]]

"""Four XLA devices of one process: replicas, shards and tensor parallelism equal plain PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_xla_training import run

from accel_state.testing import run_world

pytest.importorskip("torch_xla", reason="scripts/test-xla makes an environment with torch_xla")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # four meshes are compiled: a quarter of a minute
MESHES = ["dp4", "fsdp4", "tp4", "fsdp2_tp2"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("mesh")


@pytest.fixture(scope="module")
def results(folder) -> dict[str, Any]:
    return run("mesh", folder, CPU_NUM_DEVICES="4")


@pytest.mark.parametrize("mesh", MESHES)
def test_losses_equal_plain_pytorch(results, mesh) -> None:
    run = results[mesh]
    assert len(run["losses"]) == 20 and run["batch"] == 8
    torch.testing.assert_close(run["losses"], run["expected"], rtol=1e-5, atol=1e-5)
    assert run["later"] == {"compilations": 0, "cuts": 18, "copies": 0}


@pytest.mark.parametrize("mesh", MESHES)
def test_moving_averages_equal_those_of_torch(results, mesh) -> None:
    assert results[mesh]["averages"]["difference"] < 1e-6
    assert results[mesh]["averages"]["later"]["copies"] == 0


@pytest.mark.parametrize(("mesh", "parts"), [("dp4", 4), ("fsdp4", 4), ("tp4", 1), ("fsdp2_tp2", 2)])
def test_one_process_counts_the_parts_of_the_data(results, mesh, parts) -> None:
    """The schedule advances as on as many processes; metrics have each sample once, in order."""
    assert results[mesh]["type"] == ["XLA", 1, parts]
    assert results[mesh]["samples"] == list(range(21))


@pytest.mark.parametrize(
    ("mesh", "sharding"),
    [("dp4", "{replicated}"), ("fsdp4", "[4,1]"), ("tp4", "[4,1]"), ("fsdp2_tp2", "[2,2]")],
)
def test_weights_and_optimizer_state_are_sharded(results, mesh, sharding) -> None:
    weight, state, loaded = results[mesh]["shards"]
    assert sharding in weight and state == weight and loaded == ("" if mesh == "dp4" else weight)


@pytest.mark.parametrize("mesh", MESHES)
def test_a_checkpoint_has_the_names_of_the_model(results, mesh, folder) -> None:
    from safetensors.torch import load_file

    assert results[mesh]["loaded"]
    weights, expected = load_file(folder / mesh / "model.safetensors"), torch.load(folder / "expected.pt")
    assert list(expected) == results[mesh]["names"] and set(weights) == set(expected)
    for name, value in weights.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-4)


def load_with_ddp(folder: str) -> list[float]:
    from xla_runs import llama

    from accel import Accelerator

    accelerator = Accelerator(cpu=True)
    model = llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.load_state(folder)
    return [weight.sum().item() for weight in model.parameters()]


def test_data_parallel_processes_load_it(results, folder) -> None:
    from safetensors.torch import load_file

    weights = load_file(folder / "fsdp2_tp2" / "model.safetensors")
    sums = [weights[name].sum().item() for name in results["fsdp2_tp2"]["names"]]
    assert run_world(load_with_ddp, 2, str(folder / "fsdp2_tp2"), timeout=120) == [sums, sums]


def test_settings_that_do_not_fit(results, folder) -> None:
    sizes, context, sequence, offload, deepspeed = results["refused"]
    assert "dp_shard_size=3" in sizes and "has 4 XLA devices" in sizes
    assert "cp_size=4: XLA devices support" in context
    assert "tp_sequence_parallel=True is not available on XLA devices" in sequence
    assert "cpu_offload" in offload and "not available on XLA devices" in offload
    assert "deepspeed does not train on xla devices" in deepspeed
    late = run("late", folder, CPU_NUM_DEVICES="4")["refused"]
    assert "is in use already" in late and "Create the Accelerator before" in late

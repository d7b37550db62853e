"""How often ranks meet to save and load a state, and that this is enough where ranks do different things."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_runs import Run
from torch.utils._python_dispatch import TorchDispatchMode

from accel import FullyShardedDataParallelPlugin, ProjectConfiguration
from accel_checkpoint import verify, writer
from accel_checkpoint.manifest import Manifest
from accel_checkpoint.names import CheckpointError
from accel_state import ConfigurationError
from accel_state.testing import run_world


class Wire(TorchDispatchMode):
    """Notes every collective and message of torch.distributed, which object collectives consist of too."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in str(function) and "wait" not in str(function):
            self.operations.append(str(function))
        return function(*args, **(kwargs or {}))


def operations(folder: str, sharded: bool) -> dict[str, int]:
    settings = {"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=2)} if sharded else {}
    run = Run(**settings)
    run.train(1)
    with Wire() as save:
        run.accelerator.save_state(folder)
    with Wire() as load:
        run.accelerator.load_state(folder)
    return {"save": len(save.operations), "load": len(load.operations)}


@pytest.mark.parametrize(("sharded", "expected"), [(False, {"save": 2, "load": 4}), (True, {"save": 6, "load": 5})])
def test_ranks_meet_twice_to_save(tmp_path: Path, sharded: bool, expected: dict[str, int]) -> None:
    """Before and after the rename; sharded, also to begin, to compare units, and once for each sharded state."""
    assert run_world(operations, 2, str(tmp_path / "state"), sharded) == [expected] * 2
    assert verify(tmp_path / "state") == {} and os.listdir(tmp_path) == ["state"]


def with_hook_on(folder: str, hooked: int) -> None:
    run = Run()
    rank = run.accelerator.process_index

    def hook(models: Any, weights: Any, place: str) -> None:
        Path(place, f"of_rank_{rank}.txt").write_text("mine")

    if rank == hooked:
        run.accelerator.register_save_state_pre_hook(hook)
    run.accelerator.save_state(folder)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_hook_on_one_rank_only(tmp_path: Path, rank: int) -> None:
    run_world(with_hook_on, 2, str(tmp_path / "state"), rank)
    manifest = Manifest.read(tmp_path / "state")
    assert manifest is not None
    assert {f"of_rank_{rank}.txt", "random_states_0.pkl", "random_states_1.pkl"} <= set(manifest.files)
    assert verify(tmp_path / "state") == {} and os.listdir(tmp_path) == ["state"]


def to_different_places(folder: str, blocking: bool) -> str:
    run = Run()
    saved = run.accelerator.save_state(f"{folder}/{run.accelerator.process_index}/state", blocking=blocking)
    run.accelerator.wait_for_save()
    draw = torch.rand(1).item()
    run.accelerator.load_state(saved)
    assert torch.rand(1).item() == draw
    return str(saved)


@pytest.mark.parametrize("blocking", [True, False])
def test_the_path_is_that_of_the_main_process(tmp_path: Path, blocking: bool) -> None:
    """As of a path that is made of the time."""
    assert run_world(to_different_places, 2, str(tmp_path), blocking) == [str(tmp_path / "0" / "state")] * 2
    assert (tmp_path / "0" / "state" / "random_states_1.pkl").is_file()
    assert os.listdir(tmp_path / "0") == ["state"] and os.listdir(tmp_path / "1") == []


def on_two_nodes(folder: str, ranks: int, hooked: int) -> str:
    """With as many ranks each, whose file system the working directory stands for."""
    rank = int(os.environ["RANK"])
    node, local_rank = divmod(rank, ranks)
    os.environ.update(LOCAL_RANK=str(local_rank), LOCAL_WORLD_SIZE=str(ranks))
    os.environ.update(GROUP_RANK=str(node), GROUP_WORLD_SIZE="2")
    # Of a killed run, whose rank 1 was on this node.
    os.makedirs(f"{folder}/{node}/.at_0.rank1.accel-partial", exist_ok=True)
    os.chdir(f"{folder}/{node}")
    run = Run(project_config=ProjectConfiguration(save_on_each_node=True))
    if rank == hooked:
        run.accelerator.register_save_state_pre_hook(lambda *_: None)
    saved = run.accelerator.save_state(f"at_{rank}")
    draw = torch.rand(1).item()
    run.accelerator.load_state("at_0")
    assert torch.rand(1).item() == draw
    return str(saved)


@pytest.mark.parametrize(("ranks", "hooked"), [(1, 1), (1, 2), (2, 4)])
def test_nodes_save_under_the_path_of_the_main_process(tmp_path: Path, ranks: int, hooked: int) -> None:
    """With a hook on the second, and without one."""
    saved = run_world(on_two_nodes, 2 * ranks, str(tmp_path), ranks, hooked, state=False)
    assert saved == [str(tmp_path / str(rank // ranks) / "at_0") for rank in range(2 * ranks)]
    for node in range(2):
        assert os.listdir(tmp_path / str(node)) == ["at_0"]
        assert (tmp_path / str(node) / "at_0" / "model.safetensors").is_file()
        of_node = [f"random_states_{rank}.pkl" for rank in range(node * ranks, (node + 1) * ranks)]
        assert sorted(path.name for path in (tmp_path / str(node)).rglob("random*")) == of_node


def refused_by_the_main_process(folder: str, with_hooks: bool) -> str:
    run = Run()
    if with_hooks:  # which communicate, as far as others know
        run.accelerator.register_save_state_pre_hook(lambda *_: run.accelerator.wait_for_everyone())
    with pytest.raises((CheckpointError, ConfigurationError)) as caught:
        run.accelerator.save_state(f"{folder}/file")
    run.accelerator.save_state(f"{folder}/state")
    return str(caught.value)


@pytest.mark.parametrize("with_hooks", [False, True])
def test_all_ranks_know_that_the_main_process_cannot_begin(tmp_path: Path, with_hooks: bool) -> None:
    (tmp_path / "file").touch()
    first, second = run_world(refused_by_the_main_process, 2, str(tmp_path), with_hooks)
    assert "file is a file" in first and "rank 0: ConfigurationError" in second and "file is a file" in second
    assert sorted(os.listdir(tmp_path)) == ["file", "state"]


def not_rotated(folder: str) -> int:
    def fail(*_: Any) -> None:
        raise OSError("stale file handle")

    run = Run(project_config=ProjectConfiguration(folder, automatic_checkpoint_naming=True, total_limit=1))
    writer.rotate = fail
    run.accelerator.save_state(blocking=False)
    with pytest.raises(CheckpointError, match="older checkpoints could not be deleted"):
        run.accelerator.wait_for_save()
    return run.accelerator.project_configuration.iteration


def test_all_ranks_know_that_a_number_is_used(tmp_path: Path) -> None:
    """The checkpoint is complete, though the save has failed."""
    assert run_world(not_rotated, 2, str(tmp_path)) == [1, 1]
    assert verify(tmp_path / "checkpoints" / "checkpoint_0") == {}

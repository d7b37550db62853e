"""Saves beside the training loop: the same bytes, one at a time, and errors that are not lost."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_runs import Run, checkpoints, project, same
from torch import nn

from accel import Accelerator
from accel_checkpoint.catalog import is_complete
from accel_checkpoint.consensus import on_all_ranks
from accel_checkpoint.manifest import MANIFEST_NAME
from accel_checkpoint.names import CheckpointError
from accel_state import ConfigurationError
from accel_state.collectives.single import Collectives
from accel_state.testing import run_world

# The disk answers only when the script has nothing left to do: the rest of the save belongs to the end of the process.
EXITING = """
import os, sys, threading, torch
from collections import deque
from accel import Accelerator
fsync, answers = os.fsync, threading.Event()
os.fsync = lambda descriptor: (answers.wait(), fsync(descriptor))[1]
class Odd:
    def state_dict(self):
        return {"value": deque([1])}
    def load_state_dict(self, state): ...
accelerator = Accelerator(cpu=True)
model = accelerator.prepare(torch.nn.Linear(3, 3))
if sys.argv[2] == "failing":
    accelerator.register_for_checkpointing(Odd())
accelerator.save_state(sys.argv[1], blocking=False)
print("in flight:", accelerator.save_in_flight)
answers.set()
"""


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != MANIFEST_NAME}


def trained_meanwhile(folder: str, settings: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    """Save the same state both ways, and train on at once."""
    plain = Run(**settings).train(2)
    run = Run(**settings)
    with torch.random.fork_rng():
        run.accelerator.prepare(nn.Linear(700, 700))  # takes long enough to write
    run.train(1)
    run.accelerator.save_state(f"{folder}/waited")
    run.accelerator.save_state(f"{folder}/beside", blocking=False)
    record = run.train(2, done=1)
    run.accelerator.wait_for_save()
    assert not run.accelerator.save_in_flight
    run.accelerator.wait_for_everyone()
    return plain, record


@pytest.mark.parametrize("world", [1, 2])
def test_the_same_bytes_and_the_same_training(tmp_path: Path, world: int) -> None:
    for plain, record in run_world(trained_meanwhile, world, str(tmp_path), {}):
        assert record == plain
    assert contents(tmp_path / "waited") == contents(tmp_path / "beside")
    assert len(contents(tmp_path / "waited")) == 6 + world and is_complete(tmp_path / "beside")
    assert sorted(os.listdir(tmp_path)) == ["beside", "waited"]


def test_one_is_under_way_at_a_time(tmp_path: Path) -> None:
    run = Run(project_config=project(tmp_path, total_limit=2))
    big = run.accelerator.prepare(nn.Linear(1500, 1500))
    for number in range(4):
        nn.init.constant_(big.bias, float(number))
        path = run.accelerator.save_state(blocking=False)
        assert (
            path == tmp_path / "checkpoints" / f"checkpoint_{number}" and run.accelerator.save_iteration == number + 1
        )
        assert number == 0 or is_complete(tmp_path / "checkpoints" / f"checkpoint_{number - 1}")
    run.accelerator.load_state("latest")
    assert not run.accelerator.save_in_flight and torch.equal(big.bias, torch.full((1500,), 3.0))
    assert checkpoints(tmp_path) == ["checkpoint_2", "checkpoint_3"] and run.accelerator.save_iteration == 4


@pytest.mark.parametrize("surfacing", ["wait_for_save", "save_state", "load_state", "end_training"])
def test_an_error_surfaces_at_the_next_call_and_only_once(tmp_path: Path, surfacing: str) -> None:
    run = Run(project_config=project(tmp_path))
    run.accelerator.save_state()
    run.counter.state["odd"] = deque([1])
    run.accelerator.save_state(blocking=False)
    del run.counter.state["odd"]
    with pytest.raises(CheckpointError, match=r"object 0 \(Counter\).*collections.deque"):
        getattr(run.accelerator, surfacing)()
    assert checkpoints(tmp_path) == ["checkpoint_0"] and run.accelerator.save_iteration == 1
    if surfacing != "end_training":
        run.accelerator.save_state(blocking=False)
        run.accelerator.wait_for_save()
        assert checkpoints(tmp_path) == ["checkpoint_0", "checkpoint_1"]


@pytest.mark.timeout(300)  # a fresh interpreter, which a busy machine keeps waiting
@pytest.mark.parametrize("how", ["well", pytest.param("failing", marks=pytest.mark.slow)])
def test_the_process_waits_for_it_before_it_ends(tmp_path: Path, how: str) -> None:
    command = [sys.executable, "-c", EXITING, str(tmp_path / "state"), how]
    result = subprocess.run(command, capture_output=True, text=True, timeout=280, check=True)
    assert result.stdout == "in flight: True\n"
    assert (
        is_complete(tmp_path / "state")
        if how == "well"
        else "could not be saved" in result.stderr and not os.listdir(tmp_path)
    )


def failing_beside(folder: str, failing_rank: int) -> tuple[str, list[str]]:
    run = Run(project_config=project(Path(folder)))
    run.accelerator.save_state()

    def in_the_way(models: list[Any], weights: list[Any], output_dir: str) -> None:
        if run.accelerator.process_index == failing_rank:
            (Path(output_dir) / f"random_states_{failing_rank}.pkl").mkdir()

    handle = run.accelerator.register_save_state_pre_hook(in_the_way)
    run.accelerator.save_state(blocking=False)
    handle.remove()
    run.train(1)
    with pytest.raises(CheckpointError) as caught:
        run.accelerator.wait_for_save()
    run.accelerator.wait_for_everyone()
    left = checkpoints(Path(folder))
    run.accelerator.wait_for_everyone()
    run.accelerator.save_state(blocking=False)
    run.accelerator.end_training()
    return str(caught.value), left


@pytest.mark.parametrize("rank", [0, 1])
def test_a_failure_on_one_rank_is_known_to_all(tmp_path: Path, rank: int) -> None:
    for message, left in run_world(failing_beside, 2, str(tmp_path), rank):
        assert "could not be written" in message and f"random_states_{rank}.pkl" in message and left == ["checkpoint_0"]
    assert checkpoints(tmp_path) == ["checkpoint_0", "checkpoint_1"] and is_complete(
        tmp_path / "checkpoints" / "checkpoint_1"
    )


def test_memory_is_kept_for_the_next_copy(tmp_path: Path) -> None:
    run = Run()
    run.train(1)
    run.accelerator.save_state(tmp_path / "state", blocking=False)
    run.accelerator.wait_for_save()
    memory = run.accelerator._checkpointer._memory
    first = [segment.begin for segment in memory.segments.values()]
    run.accelerator.save_state(tmp_path / "state", blocking=False)
    run.accelerator.wait_for_save()
    assert first == [segment.begin for segment in memory.segments.values()]
    weights = run.weights()
    run.accelerator.load_state(tmp_path / "state")
    assert same(run.weights(), weights)


# -- how the ranks agree
# -------------------------------------------------------------------------------------------------


class LostRanks(Collectives):
    """Collectives whose other ranks are gone."""

    world_size = 2

    def all_gather_object(self, obj: Any) -> list[Any]:
        raise RuntimeError("connection closed by peer")


def test_ranks_that_are_gone() -> None:
    with (
        pytest.raises(CheckpointError, match="rank 0 cannot"),
        on_all_ranks(LostRanks(), "saving"),
    ):
        pass


def test_processes_without_torch_distributed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run()
    monkeypatch.setattr(run.accelerator.process_state, "num_processes", 2)
    with pytest.raises(ConfigurationError, match="blocking=True"):
        run.accelerator.save_state(tmp_path / "state", blocking=False)


def test_accelerators_without_a_save() -> None:
    accelerator = Accelerator(cpu=True)
    calls: list[Callable[[], Any]] = [accelerator.wait_for_save, accelerator.end_training]
    assert [call() for call in calls] == [None, None] and not accelerator.save_in_flight

"""Debug mode, and what is said when a collective does not complete."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from accel_state import CollectiveTimeoutError, DistributedOperationException, PartialState
from accel_state import operations as ops
from accel_state.collectives.diagnosis import is_lost
from accel_state.collectives.torch import TorchCollectives
from accel_state.testing import run_world

DEBUG = {"ACCELERATE_DEBUG_MODE": "1"}


def refused(function: Any, *args: Any, **kwargs: Any) -> str:
    try:
        function(*args, **kwargs)
    except DistributedOperationException as error:
        return str(error)
    raise AssertionError("the mismatch was not noticed")


def mismatches() -> dict[str, str]:
    rank = PartialState().process_index
    found = {
        "shape": refused(ops.gather, torch.zeros(1, 5 if rank == 0 else 6)),
        "dtype": refused(ops.reduce, torch.zeros(2, dtype=torch.float32 if rank == 0 else torch.float64)),
        "structure": refused(ops.broadcast, {"a": torch.zeros(1)} if rank == 0 else [torch.zeros(1)]),
        "operation": refused(ops.gather if rank == 0 else ops.reduce, torch.zeros(2)),
        "dimensions": refused(ops.pad_across_processes, torch.zeros((3,) if rank == 0 else (3, 1))),
        "scalar": refused(ops.gather, torch.zeros(()) if rank == 0 else torch.zeros(1)),
    }
    agreeing = ops.gather({"a": torch.ones(2), "b": [torch.tensor(rank)]})
    assert agreeing["b"][0].tolist() == list(range(PartialState().num_processes))
    assert ops.pad_across_processes(torch.ones(rank + 1)).shape == (PartialState().num_processes,)
    return found


def test_mismatches_raise_on_every_rank_with_every_shape() -> None:
    results = run_world(mismatches, 2, env=DEBUG, timeout=60)  # a collective that is not refused waits for half an hour
    for found in results:
        assert "Operation: `accel_state.operations.gather`" in found["shape"]
        assert "- Process 0: [1, 5]" in found["shape"] and "- Process 1: [1, 6]" in found["shape"]
        assert "float32[2]" in found["dtype"] and "float64[2]" in found["dtype"]
        assert "Process 0: {'a': [1]}" in found["structure"] and "Process 1: [[1]]" in found["structure"]
        assert "pad_across_processes" in found["dimensions"] and "- Process 1: [3, 1]" in found["dimensions"]
        assert "Process 0: []" in found["scalar"]
        assert "Process 0: `accel_state.operations.gather`" in found["operation"]
        assert "Process 1: `accel_state.operations.reduce`" in found["operation"]


def with_short_timeout() -> PartialState:
    """Short for the collectives alone, and only when all ranks are there: they may take longer than that to come up."""
    state = PartialState()
    state.wait_for_everyone()
    state.collectives = TorchCollectives(state.device, dist.new_group(timeout=timedelta(seconds=3)))
    return state


def arrive_alone() -> str:
    state = with_short_timeout()
    if state.process_index == 1:
        time.sleep(6)
        return "late"
    try:
        ops.gather(torch.ones(1))
    except CollectiveTimeoutError as error:
        return str(error)
    raise AssertionError("the collective completed without rank 1")


@pytest.mark.slow  # waits for a timeout of three ranks; the test after it is fast, with two ranks
def test_a_timeout_names_who_arrived_and_who_did_not() -> None:
    messages = run_world(arrive_alone, 3)
    assert messages[1] == "late"
    for rank in (0, 2):
        text = messages[rank]
        assert f"accel_state.operations.gather did not complete on rank {rank} of 3" in text
        assert "rank 1 did not arrive" in text and "why rank 1 did not reach this line" in text
        for arrived in (0, 2):
            assert f"rank {arrived} waits in accel_state.operations.gather at" in text
        assert "test_debug.py:" in text and "in arrive_alone" in text


def wait_apart() -> str:
    state = with_short_timeout()
    try:
        if state.process_index == 0:
            state.wait_for_everyone()
            ops.gather(torch.ones(1))
        else:
            ops.gather_object(["x" * 100])
            state.wait_for_everyone()
    except (CollectiveTimeoutError, DistributedOperationException) as error:
        return str(error)
    return ""


def test_ranks_that_wait_at_different_lines_are_told_so() -> None:
    messages = run_world(wait_apart, 2)
    assert any("wait at different lines" in text for text in messages), messages
    told = next(text for text in messages if "wait at different lines" in text)
    assert "in wait_apart" in told


def fail_alone() -> str:
    """A collective that cannot be carried out, though all ranks are there and answer."""
    state = PartialState()
    try:
        state.collectives.all_reduce(torch.ones(2, dtype=torch.int16))
    except RuntimeError as error:
        return type(error).__name__
    return "completed"


def test_an_error_of_a_rank_is_not_called_a_timeout() -> None:
    assert run_world(fail_alone, 2) == ["RuntimeError", "RuntimeError"]


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:5"), True),
        (RuntimeError("Timed out waiting 3000ms for recv operation to complete"), True),
        (dist.DistBackendError("NCCL error in: x"), True),
        (RuntimeError("all_reduce got a tensor on simgpu:1, but the current device is 0"), False),
        (torch.OutOfMemoryError("GPU out of memory while another peer waits"), False),
    ],
)
def test_which_errors_are_about_other_ranks(error: RuntimeError, lost: bool) -> None:
    assert is_lost(error) is lost

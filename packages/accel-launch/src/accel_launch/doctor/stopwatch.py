"""How long actions take on all ranks at once."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from accel_state import PartialState

REPEATS = 7


def median_seconds(state: PartialState, action: Callable[[], Any]) -> float:
    """Seconds of an action that all ranks begin together."""
    action()
    barrier(state)
    return median_of(state, action, REPEATS)


def median_of(state: PartialState, action: Callable[[], Any], times: int) -> float:
    """The median of several, each until the device has finished."""
    taken = []
    synchronize(state.device)
    for _ in range(times):
        begin = time.perf_counter()
        action()
        synchronize(state.device)
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken)


def median_computed(state: PartialState, action: Callable[[], Any], times: int, crowding: float) -> float:
    """The median of several on a CPU, as they take when only the ranks use it, whatever else the machine does.

    Args:
        state: of this rank.
        action: what is to be measured; it waits for nothing.
        times: number of repetitions.
        crowding: as :func:`crowding` has it.
    """
    taken = []
    for _ in range(times):
        begin = time.thread_time()
        action()
        taken.append(time.thread_time() - begin)
    return crowding * statistics.median(taken)


def crowding(state: PartialState, ranks: int) -> float:
    """How many threads of the ranks of a node there are for each of its processors; 1 if there are fewer.

    Args:
        state: of this rank.
        ranks: of a node.
    """
    own = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    every: list[Any] = [own]
    if state.num_processes > 1:
        every = [None] * state.num_processes
        dist.all_gather_object(every, own)
    first = state.process_index // ranks * ranks
    processors = {one for rank in every[first : first + ranks] for one in rank}
    return max(ranks * torch.get_num_threads() / len(processors), 1.0)


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type != "cpu":
        torch.accelerator.synchronize()


def barrier(state: PartialState) -> None:
    """Wait for all ranks."""
    if state.num_processes > 1:
        dist.barrier()


def slowest(state: PartialState, seconds: float) -> float:
    """The largest value of all ranks."""
    value = torch.tensor([seconds], dtype=torch.float64 if state.device.type == "cpu" else torch.float32)
    value = value.to(state.device)
    if state.num_processes > 1:
        dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return float(value.item())

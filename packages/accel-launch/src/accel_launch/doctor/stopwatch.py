"""How long actions take on all ranks at once."""

from __future__ import annotations

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

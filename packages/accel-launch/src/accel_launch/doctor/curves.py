"""Seconds of operations and messages by their size: devices reach their limits at some sizes only."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

from accel_state import PartialState
from accel_state.hardware import Curve

from .stopwatch import REPEATS, barrier, median_of, slowest

_FEATURES = (64, 128, 256, 512, 1024, 2048)  # of linear layers
_LENGTHS = (128, 256, 512, 1024, 2048)  # of sequences
# An allocator gives large tensors back to the operating system, and each page of a new one costs time.
_BYTES = tuple(1 << power for power in (14, 17, 20, 23, 25, 27, 29))
_PAYLOADS = tuple(1 << power for power in (3, 13, 17, 20, 23, 25, 28))
_SAMPLE_SECONDS = 0.01
_LONGEST_SECONDS = 0.1
"""No larger size is measured after one that takes so long: the rate does not change any more."""
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def computation_curves(state: PartialState, dtypes: Sequence[str], operation: float) -> dict[str, Curve]:
    """The curves of :class:`~accel_state.hardware.HardwareProfile` that one device has.

    Args:
        state: of this rank.
        dtypes: those of matrix products.
        operation: seconds to subtract, in which the host prepares an operation.
    """
    device, found = state.device, {}
    for name in (name for name in dtypes if name in DTYPES):
        dtype = DTYPES[name]
        products = ((8 * size**3, _linear(size, dtype, device), 3) for size in _FEATURES)
        found[f"products {name}"] = _curve(state, products, operation)
        attention = ((7 * 4 * size**2 * 64, _attention(size, dtype, device), 2) for size in _LENGTHS)
        found[f"attention {name}"] = _curve(state, attention, operation)
    kinds: dict[str, Callable[[torch.Tensor], Any]] = {
        "memory": lambda value: value + 1,
        "in place": lambda value: value.mul_(1.0),
        "functions": torch.sigmoid,
    }
    for name, run in kinds.items():
        found[name] = _curve(state, ((size, _on(run, size, device), 1) for size in _BYTES), operation)
    return found


def message_curves(state: PartialState, group: Any, ranks: int) -> dict[str, Curve]:
    """Curves of the collectives of all ranks of a node, by the bytes that each of them sends in a ring.

    In a step, ranks compute between messages, and where they share processors they do not end together. So a message is
    measured with products before it, and their time is subtracted.
    """
    found: dict[str, Curve] = {}
    products = _linear(_FEATURES[1], torch.float32, state.device)
    alone = _seconds(state, products)
    for kind, make in _COLLECTIVES.items():
        share = (2 if kind == "all-reduce" else 1) * (ranks - 1) / ranks
        sizes = (max(size // 4 // ranks, 1) * ranks for size in _PAYLOADS)
        points = ((4 * size * share, _in_turn(products, make(size, ranks, state.device, group)), 1) for size in sizes)
        found[kind] = _curve(state, points, alone)
    return found


def alone_speedup(state: PartialState) -> float:
    """How many times as fast the first rank of each node is while the other ranks wait."""
    product = _linear(_FEATURES[2], torch.float32, state.device)
    together, alone = _seconds(state, product), 0.0
    barrier(state)
    if state.local_process_index == 0:
        alone = median_of(state, product, 5 * REPEATS)
    return max(together / slowest(state, alone), 1.0)


def _curve(state: PartialState, points: Iterable[tuple[float, Callable[[], Any], int]], overhead: float) -> Curve:
    """Seconds by size.

    Args:
        state: of this rank.
        points: a size, what is to be measured, and the number of operations in it; the size is the mean of theirs.
        overhead: seconds to subtract for each operation.
    """
    curve: list[list[float]] = []
    for size, action, number in points:
        seconds = _seconds(state, action)
        alone = max(seconds / number - overhead, 1e-9)
        # A larger one cannot take less, however noisy the machine is.
        curve.append([float(size), max(alone, curve[-1][1] if curve else 0.0)])
        if seconds > _LONGEST_SECONDS:
            break
    return curve


def _seconds(state: PartialState, action: Callable[[], Any]) -> float:
    """Of one of many calls in a row, so that a device is not idle between them; of the slowest rank."""
    action()
    barrier(state)
    once = slowest(state, median_of(state, action, 3))
    calls = max(math.ceil(_SAMPLE_SECONDS / once), 1)

    def many() -> None:
        for _ in range(calls):
            action()

    return slowest(state, median_of(state, many, REPEATS if calls > 1 else 3)) / calls


def _linear(size: int, dtype: torch.dtype, device: torch.device) -> Callable[[], None]:
    """The three products of a linear layer with as many features, and four times as many tokens."""
    tokens, gradient = (torch.randn(4 * size, size, device=device).to(dtype) for _ in range(2))
    weight = torch.randn(size, size, device=device).to(dtype)

    def run() -> None:
        tokens @ weight.t()
        gradient @ weight
        gradient.t() @ tokens

    return run


def _attention(size: int, dtype: torch.dtype, device: torch.device) -> Callable[[], None]:
    """Attention of four heads of width 64, forward and backward."""
    query, key, value = (torch.randn(1, 4, size, 64, device=device).to(dtype).requires_grad_() for _ in range(3))
    gradient = torch.randn(1, 4, size, 64, device=device).to(dtype)

    def run() -> None:
        result = functional.scaled_dot_product_attention(query, key, value)
        torch.autograd.grad(result, (query, key, value), gradient)

    return run


def _in_turn(first: Callable[[], Any], second: Callable[[], Any]) -> Callable[[], None]:
    def run() -> None:
        first()
        second()

    return run


def _on(run: Callable[[torch.Tensor], Any], size: int, device: torch.device) -> Callable[[], Any]:
    """An operation that reads and writes so many bytes."""
    value = torch.ones(size // 8, device=device)
    return lambda: run(value)


def _all_reduce(size: int, ranks: int, device: torch.device, group: Any) -> Callable[[], Any]:
    data = torch.zeros(size, device=device)
    return lambda: dist.all_reduce(data, group=group)


def _all_gather(size: int, ranks: int, device: torch.device, group: Any) -> Callable[[], Any]:
    whole, part = torch.zeros(size, device=device), torch.zeros(size // ranks, device=device)
    return lambda: dist.all_gather_into_tensor(whole, part, group=group)


def _reduce_scatter(size: int, ranks: int, device: torch.device, group: Any) -> Callable[[], Any]:
    whole, part = torch.zeros(size, device=device), torch.zeros(size // ranks, device=device)
    return lambda: dist.reduce_scatter_tensor(part, whole, group=group)


def _all_to_all(size: int, ranks: int, device: torch.device, group: Any) -> Callable[[], Any]:
    sent, received = torch.zeros(size, device=device), torch.zeros(size, device=device)
    return lambda: dist.all_to_all_single(received, sent, group=group)


_COLLECTIVES: dict[str, Callable[[int, int, torch.device, Any], Callable[[], Any]]] = {
    "all-reduce": _all_reduce,
    "all-gather": _all_gather,
    "reduce-scatter": _reduce_scatter,
    "all-to-all": _all_to_all,
}

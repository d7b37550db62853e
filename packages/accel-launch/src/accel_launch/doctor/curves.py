"""Seconds of operations and messages by their size: devices reach their limits at some sizes only."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

from accel_state import PartialState
from accel_state.hardware import Curve

from .stopwatch import REPEATS, barrier, median_computed, median_of, slowest

_FEATURES = (64, 128, 256, 512, 1024, 2048)  # of linear layers
_LENGTHS = (128, 256, 512, 1024, 2048)  # of sequences
# An allocator gives large tensors back to the operating system, and each page of a new one costs time.
_BYTES = tuple(1 << power for power in (14, 17, 19, 21, 23, 25, 27, 29))
_PAYLOADS = tuple(1 << power for power in (3, 13, 17, 20, 23, 25, 27))
_CYCLED_BYTES, _CYCLED = 64 << 20, 256
"""Bytes of the tensors that take turns, which is more than caches hold, and their number: a step does not find in the
caches what it last used some operations ago."""
_COMPUTED = (128, 256, 512, 1024)
"""Features of linear layers that ranks compute before they wait for each other; those before messages of any size
first."""
_MEETINGS, _MEETINGS_SECONDS = 10, 1.0
_SAMPLE_SECONDS, _MET_SECONDS = 0.01, 0.05  # where ranks wait for each other, the time of a call varies more
_LONGEST_SECONDS = 0.1
"""No larger size is measured after one that takes so long: the rate does not change any more."""
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def computation_curves(state: PartialState, dtypes: Sequence[str], crowded: float) -> dict[str, Curve]:
    """The curves of :class:`~accel_state.hardware.HardwareProfile` that one CPU has; none of an accelerator.

    An accelerator computes beside the host, so that clocks of the host see the longer of both. On an H100, plans
    without curves were 12% off (median of eight steps), plans with such curves 28%.

    Args:
        state: of this rank.
        dtypes: those of matrix products.
        crowded: threads of ranks for each processor.
    """
    device = state.device
    found: dict[str, Curve] = {}
    if device.type != "cpu":
        return found
    tiny = torch.ones(8, device=device)
    operation = _seconds(state, lambda: tiny + 1, crowded)  # what the host prepares is measured apart
    for name in (name for name in dtypes if name in DTYPES):
        dtype = DTYPES[name]
        products = ((8 * size**3, _linear(size, dtype, device), 3) for size in _FEATURES)
        found[f"products {name}"] = _curve(state, products, operation, crowded)
        attention = ((7 * 4 * size**2 * 64, _attention(size, dtype, device), 2) for size in _LENGTHS)
        found[f"attention {name}"] = _curve(state, attention, operation, crowded)
    kinds: dict[str, Callable[[int], Callable[[], Any]]] = {
        "memory": lambda size: _to_result(lambda value: value + 1, size, device),
        "in place": lambda size: _in_place(lambda value: value.mul_(1.0), size, device),
        "functions": lambda size: _to_result(torch.sigmoid, size, device),
    }
    for name, make in kinds.items():
        found[name] = _curve(state, ((size, make(size), 1) for size in _BYTES), operation, crowded)
    return found


def message_curves(state: PartialState, group: Any, ranks: int, crowded: float) -> dict[str, Curve]:
    """Curves of the collectives of groups of ranks of a node, by the bytes that each of them sends in a ring.

    In a step, ranks compute between messages, and where they share processors they do not end together. So a message is
    measured with short products before it, and their time is subtracted. What an empty one takes longer after longer
    products is the curve "waiting", by the seconds of those.

    Args:
        state: of this rank.
        group: that of this rank, while all others are measured too.
        ranks: of the group.
        crowded: threads of ranks for each processor.
    """
    found: dict[str, Curve] = {}
    value = torch.zeros(1, device=state.device)

    def meet() -> None:
        dist.all_reduce(value, group=group)

    waiting: list[list[float]] = []
    shortest = 0.0
    for size in _COMPUTED:
        products = _linear(size, torch.float32, state.device)
        alone = _seconds(state, products, crowded)
        meetings = max(3, min(_MEETINGS, round(_MEETINGS_SECONDS / alone)))
        taken = _mean_seconds(state, _in_turn(products, meet), meetings) - alone
        shortest = taken if not waiting else shortest
        waiting.append([alone, max(taken - shortest, waiting[-1][1] if waiting else 1e-9)])
    found["waiting"] = waiting
    products, alone = _linear(_COMPUTED[0], torch.float32, state.device), waiting[0][0]
    for kind, make in _COLLECTIVES.items():
        share = (2 if kind == "all-reduce" else 1) * (ranks - 1) / ranks
        sizes = (max(size // 4 // ranks, 1) * ranks for size in _PAYLOADS)
        points = ((4 * size * share, _in_turn(products, make(size, ranks, state.device, group)), 1) for size in sizes)
        found[kind] = _curve(state, points, alone, sample=_MET_SECONDS)
    return found


def alone_speedup(state: PartialState) -> float:
    """How many times as fast the first rank of each node is while the other ranks wait."""
    product = _linear(_FEATURES[2], torch.float32, state.device)
    together, alone = _seconds(state, product), 0.0
    barrier(state)
    if state.local_process_index == 0:
        alone = median_of(state, product, 5 * REPEATS)
    return max(together / slowest(state, alone), 1.0)


def _curve(
    state: PartialState,
    points: Iterable[tuple[float, Callable[[], Any], int]],
    overhead: float,
    crowded: float | None = None,
    sample: float = _SAMPLE_SECONDS,
) -> Curve:
    """Seconds by size.

    Args:
        state: of this rank.
        points: a size, what is to be measured, and the number of operations in it; the size is the mean of theirs.
        overhead: seconds to subtract for each operation.
        crowded, sample: as of :func:`_seconds`.
    """
    curve: list[list[float]] = []
    for size, action, number in points:
        seconds = _seconds(state, action, crowded, sample)
        curve.append([float(size), max(seconds / number - overhead, 1e-9)])
        if seconds > _LONGEST_SECONDS:
            break
    # A smaller one takes no longer than a larger one did, however noisy the machine is.
    for smaller, larger in reversed(list(itertools.pairwise(curve))):
        smaller[1] = min(smaller[1], larger[1])
    return curve


def _seconds(
    state: PartialState, action: Callable[[], Any], crowded: float | None = None, sample: float = _SAMPLE_SECONDS
) -> float:
    """Of one of many calls in a row, so that a device is not idle between them; of the slowest rank.

    Args:
        state: of this rank.
        action: what is to be measured.
        crowded: threads of ranks for each processor, if it only computes; None if it waits for others.
        sample: seconds of calls in a row.
    """
    action()
    barrier(state)
    once = slowest(state, median_of(state, action, 3))
    calls = max(math.ceil(sample / once), 1)

    def many() -> None:
        for _ in range(calls):
            action()

    times = REPEATS if calls > 1 else 3
    taken = median_of(state, many, times) if crowded is None else median_computed(state, many, times, crowded)
    return slowest(state, taken) / calls


def _mean_seconds(state: PartialState, action: Callable[[], Any], times: int) -> float:
    """Of one of several calls in a row, whose sum is what a step takes: of the repetition that was disturbed least."""
    means = []
    for _ in range(3):
        barrier(state)
        begin = time.perf_counter()
        for _ in range(times):
            action()
        means.append(slowest(state, time.perf_counter() - begin) / times)
    return min(means)


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


def _to_result(run: Callable[[torch.Tensor], Any], size: int, device: torch.device) -> Callable[[], Any]:
    """An operation that reads and writes so many bytes: of the result before, which is still in the caches."""
    values = [torch.ones(size // 8, device=device) for _ in range(_cycle(size // 2))]
    turns = _turns(values)

    def once() -> None:
        index = next(turns)
        values[index] = run(values[index - 1])

    return once


def _in_place(run: Callable[[torch.Tensor], Any], size: int, device: torch.device) -> Callable[[], Any]:
    values = [torch.ones(size // 8, device=device) for _ in range(_cycle(size // 2))]
    turns = _turns(values)
    return lambda: run(values[next(turns)])


def _cycle(size: int) -> int:
    """How many tensors of this size take turns."""
    return max(2, min(_CYCLED, _CYCLED_BYTES // max(size, 1)))


def _turns(values: Sequence[Any]) -> Iterator[int]:
    return itertools.cycle(range(len(values)))


def _all_reduce(size: int, ranks: int, device: torch.device, group: Any) -> Callable[[], Any]:
    values = [torch.zeros(size, device=device) for _ in range(_cycle(4 * size))]
    turns = _turns(values)
    return lambda: dist.all_reduce(values[next(turns)], group=group)


def _to_new(send: Callable[..., Any], sent: int, received: int, device: torch.device, group: Any) -> Callable[[], Any]:
    """A collective into a new tensor, as strategies call it."""
    inputs = [torch.zeros(sent, device=device) for _ in range(_cycle(4 * sent))]
    results = [torch.empty(received, device=device) for _ in range(_cycle(4 * received))]
    turns, places = _turns(inputs), _turns(results)

    def once() -> None:
        results[place := next(places)] = torch.empty(0)
        results[place] = torch.empty(received, device=device)
        send(results[place], inputs[next(turns)], group=group)

    return once


def _all_gather(size: int, ranks: int, device: torch.device, group: Any) -> Callable[[], Any]:
    return _to_new(dist.all_gather_into_tensor, size // ranks, size, device, group)


def _reduce_scatter(size: int, ranks: int, device: torch.device, group: Any) -> Callable[[], Any]:
    return _to_new(dist.reduce_scatter_tensor, size, size // ranks, device, group)


def _all_to_all(size: int, ranks: int, device: torch.device, group: Any) -> Callable[[], Any]:
    return _to_new(dist.all_to_all_single, size, size, device, group)


_COLLECTIVES: dict[str, Callable[[int, int, torch.device, Any], Callable[[], Any]]] = {
    "all-reduce": _all_reduce,
    "all-gather": _all_gather,
    "reduce-scatter": _reduce_scatter,
    "all-to-all": _all_to_all,
}

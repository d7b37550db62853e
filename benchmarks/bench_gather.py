"""Gathering on two processes, relative to torch.distributed.

A nested batch of many small tensors, relative to one all_gather per tensor; and single tensors of several sizes, with
and without the header that finds ranks with different inputs, relative to one all_gather or all_reduce.

python benchmarks/bench_gather.py
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import _measure
import torch
import torch.distributed as dist

# accel uses one collective per dtype; the 40 tensors have two dtypes.
TARGET = 0.5
TENSORS = 40
CALLS = 10
ROUNDS = 40
# The header takes at most 1% of the time of calls that follow each other without a pause.
HEADER_TARGET = 1.02
# Lengths travel with the rows; as elsewhere, some calls have a header.
RAGGED_CALLS, RAGGED_TARGET = 500, 1.1
SIZES = {"4 B": 1, "64 KiB": 1 << 14, "4 MiB": 1 << 20}


def nested_batch() -> dict[str, Any]:
    """Predictions of an evaluation loop: many small tensors of two dtypes, in lists in a dictionary."""
    half = TENSORS // 2
    return {"scores": [torch.randn(8, 4) for _ in range(half)], "labels": [torch.randint(4, (8,)) for _ in range(half)]}


def one_by_one(batch: dict[str, Any]) -> dict[str, Any]:
    """The same in plain PyTorch, with one collective per tensor."""

    def gather(tensor: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, tensor)
        return torch.cat(parts)

    return {name: [gather(tensor) for tensor in tensors] for name, tensors in batch.items()}


def repeated(gather: Callable[[Any], Any], batch: Any) -> Callable[[], None]:
    def run() -> None:
        for _ in range(CALLS):
            gather(batch)

    return run


def work_on_sizes() -> None:
    """Measure single tensors in this process, which is one of two ranks."""
    from accel_state import PartialState
    from accel_state.operations import gather, reduce

    torch.set_num_threads(1)
    state = PartialState(cpu=True)
    schedule = state.collectives.schedule
    headers = 0
    plan = schedule.plan

    def counting(*args: Any) -> None:
        nonlocal headers
        headers += 1
        plan(*args)

    schedule.plan = counting  # type: ignore[method-assign]

    def checked(function: Callable[[Any], Any], headers: bool) -> Callable[[Any], Any]:
        def run(tensor: torch.Tensor) -> None:
            state.collectives.schedule = schedule if headers else None
            function(tensor)

        return run

    def raw_gather(tensor: torch.Tensor) -> torch.Tensor:
        out = torch.empty(state.num_processes * tensor.numel())
        dist.all_gather_into_tensor(out, tensor)
        return out

    def raw_reduce(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.clone()
        dist.all_reduce(tensor)
        return tensor.div_(state.num_processes)

    figures: dict[str, dict[str, float]] = {}
    warnings.simplefilter("ignore", FutureWarning)
    for size, numel in SIZES.items():
        tensor = torch.randn(numel)
        for name, function, raw in (("gather", gather, raw_gather), ("reduce", reduce, raw_reduce)):
            assert torch.allclose(function(tensor), raw(tensor)), f"wrong result for {name}"
            variants = {
                "raw": repeated(raw, tensor),
                "with": repeated(checked(function, True), tensor),
                "without": repeated(checked(function, False), tensor),
            }
            before = schedule.calls, headers
            times = _measure.in_turns(variants, ROUNDS, warm_up=10, clock=time.perf_counter)
            figures[f"{name} of {size}"] = {
                "raw": sorted(times["raw"])[ROUNDS // 2] / CALLS * 1e6,
                "ratio": _measure.ratio(times, "with"),
                "headers": 100 * (headers - before[1]) / (schedule.calls - before[0]),
                "header": _measure.ratio(times, "with", "without"),
            }
    if state.is_main_process:
        _measure.report(figures)
    state.destroy_process_group()


def work(library: str) -> None:
    """Measure one library in this process, which is one of two ranks."""
    torch.set_num_threads(1)
    accelerator = importlib.import_module(library).Accelerator(cpu=True)
    batch = nested_batch()
    ours, plain = accelerator.gather(batch), one_by_one(batch)
    for name, tensors in plain.items():
        assert all(torch.equal(one, other) for one, other in zip(tensors, ours[name], strict=True)), (
            f"wrong result for {name}"
        )
    variants = {"raw": repeated(one_by_one, batch), "gathered": repeated(accelerator.gather, batch)}
    times = _measure.in_turns(variants, ROUNDS, clock=time.perf_counter)
    if accelerator.is_main_process:
        raw = sorted(times["raw"])[ROUNDS // 2] / CALLS * 1e6
        _measure.report({"raw": raw, "ratio": _measure.ratio(times, "gathered")})
    accelerator.end_training()


def work_on_ragged() -> None:
    """Count the messages of calls whose numbers of rows differ between the two ranks."""
    from accel_state import PartialState
    from accel_state.collectives import header
    from accel_state.collectives import torch as module
    from accel_state.operations.ragged import gather_ragged

    state = PartialState(cpu=True)
    messages = 0
    original = module._all_gather_flat

    def counting(*args: Any, **kwargs: Any) -> Any:
        nonlocal messages
        messages += 1
        return original(*args, **kwargs)

    rows = [torch.randn(8 - state.process_index, 4), torch.zeros(8 - state.process_index)]
    for _ in range(header.FIRST_CALLS):
        gather_ragged("bench_gather", rows, rows, state.collectives)
    module._all_gather_flat = counting
    begin = time.process_time()
    for _ in range(RAGGED_CALLS):
        gather_ragged("bench_gather", rows, rows, state.collectives)
    if state.is_main_process:
        _measure.report({"messages": messages / RAGGED_CALLS, "cpu": (time.process_time() - begin) / RAGGED_CALLS})
    state.destroy_process_group()


def main() -> None:
    """Print the table and compare the figure with the target."""
    found = _measure.libraries()
    figures = {
        label: _measure.worker(python, __file__, "--library", module, processes=2)
        for label, (python, module) in found.items()
    }
    _measure.heading(f"Gathering {TENSORS} small tensors on two processes")
    _measure.row("one all_gather per tensor", f"{figures['accel']['raw']:.0f} us")
    for label, found_figures in figures.items():
        target = f"target: at most {TARGET:.2f}: {_measure.verdict(found_figures['ratio'], TARGET)}"
        _measure.row(
            f"{label}, relative to that", f"{found_figures['ratio']:.3f} x", target if label == "accel" else ""
        )
    _measure.heading("One tensor on two processes, relative to torch.distributed")
    for label, found_figures in _measure.worker(sys.executable, __file__, "--sizes", processes=2).items():
        header = found_figures["header"]
        note = f"{found_figures['raw']:.0f} us; headers: {found_figures['headers']:.1f} in 100 calls, {header:.3f} x"
        target = f"target: at most {HEADER_TARGET:.2f}: {_measure.verdict(header, HEADER_TARGET)}"
        _measure.row(label, f"{found_figures['ratio']:.3f} x", f"of {note}, {target}")
    ragged = _measure.worker(sys.executable, __file__, "--ragged", processes=2)
    note = f"{ragged['cpu'] * 1e6:.0f} us of processor time"
    target = f"target: at most {RAGGED_TARGET}: {_measure.verdict(ragged['messages'], RAGGED_TARGET)}"
    _measure.row("messages of a ragged gather", f"{ragged['messages']:.2f}", f"{note}; {target}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--library", help="measure this library in this process (used internally for the worker processes)"
    )
    parser.add_argument("--sizes", action="store_true", help="measure single tensors in this process (likewise)")
    parser.add_argument("--ragged", action="store_true", help="count messages of ragged gathers (likewise)")
    chosen = parser.parse_args()
    if chosen.sizes:
        work_on_sizes()
    elif chosen.ragged:
        work_on_ragged()
    elif chosen.library:
        work(chosen.library)
    else:
        main()

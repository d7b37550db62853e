"""Gathering a nested batch of many small tensors on two processes, relative to one all_gather per tensor.

python benchmarks/bench_gather.py
"""

from __future__ import annotations

import argparse
import importlib
import time
from collections.abc import Callable
from typing import Any

import _measure
import torch
import torch.distributed as dist

# accel uses one collective per dtype; the 40 tensors have two dtypes.
TARGET = 0.5
TENSORS = 40
CALLS = 10
ROUNDS = 25


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


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--library", help="measure this library in this process (used internally for the worker processes)"
    )
    chosen = parser.parse_args().library
    work(chosen) if chosen else main()

"""The time that log() of ten tensors blocks the training loop while trackers write in the background.

    python benchmarks/bench_track.py

A loop of small training steps, on an accelerator if there is one, logs ten tensors per step. Only the call is timed;
an empty function is timed in the same loop to show the noise of the machine.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import _measure
import torch
from torch import nn

MICROSECONDS_TARGET = 50.0
TENSORS = 10
STEPS = 3000
WARM_UP = 200


def percentiles(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {"p50": statistics.median(ordered) * 1e6, "p99": ordered[len(ordered) * 99 // 100] * 1e6}


def timed_loop(
    log: Callable[[dict[str, torch.Tensor], int], None], device: torch.device
) -> dict[str, dict[str, float]]:
    """Time the call and an empty function in a loop of training steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, TENSORS)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs = torch.randn(64, 64, device=device)
    calls: list[float] = []
    nothing: list[float] = []
    for step in range(STEPS + WARM_UP):
        losses = model(inputs).square().mean(dim=0)
        optimizer.zero_grad()
        losses.sum().backward()
        optimizer.step()
        values = {f"loss/{index}": loss for index, loss in enumerate(losses.unbind())}
        begin = time.perf_counter()
        log(values, step)
        middle = time.perf_counter()
        (lambda values, step: None)(values, step)
        end = time.perf_counter()
        if step >= WARM_UP:
            calls.append(middle - begin)
            nothing.append(end - middle)
    return {"log": percentiles(calls), "nothing": percentiles(nothing)}


def work(library: str, trackers: list[str]) -> None:
    """Measure one library in this process."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        accelerator = importlib.import_module(library).Accelerator(log_with=trackers, project_dir=folder)
        accelerator.init_trackers("bench", config={"lr": 0.01})
        _measure.report(timed_loop(lambda values, step: accelerator.log(values, step=step), accelerator.device))
        accelerator.end_training()


def main(trackers: list[str]) -> None:
    """Print the table and compare the figure with the target."""
    for tracker in trackers:
        _measure.heading(f"log() of {TENSORS} tensors, to {tracker}")
        ours = _measure.worker(sys.executable, __file__, "--library", "accel", "--trackers", tracker)
        note = (
            f"target: at most {MICROSECONDS_TARGET:.0f} us: {_measure.verdict(ours['log']['p50'], MICROSECONDS_TARGET)}"
        )
        _measure.row("accel, p50", f"{ours['log']['p50']:.1f} us", note)
        empty = f"(an empty function: {ours['nothing']['p99']:.1f} us)"
        _measure.row("accel, p99", f"{ours['log']['p99']:.1f} us", empty)
        for label, figures in reference_figures(tracker).items():
            _measure.row(f"{label}, p50", f"{figures['log']['p50']:.1f} us")
            _measure.row(f"{label}, p99", f"{figures['log']['p99']:.1f} us")


def reference_figures(tracker: str) -> dict[str, Any]:
    """The same with the reference, if it supports the tracker and its library is installed."""
    python = _measure.reference_python()
    if python is None or tracker == "jsonl":
        return {}
    try:
        return {
            "reference": _measure.worker(
                python, __file__, "--library", _measure.REFERENCE_MODULE, "--trackers", tracker
            )
        }
    except RuntimeError as error:
        print(f"(without the reference: {str(error).splitlines()[-1]})")
        return {}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--library", help="measure this library in this process (used internally for the worker processes)"
    )
    parser.add_argument(
        "--trackers", nargs="+", default=["jsonl", "tensorboard"], help="trackers to log to, one after the other"
    )
    arguments = parser.parse_args()
    work(arguments.library, arguments.trackers) if arguments.library else main(arguments.trackers)

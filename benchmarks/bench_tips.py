"""The figures of docs/guides/performance.md: what each tip gains on this machine.

    python benchmarks/bench_tips.py          # the table of the page; two minutes
    python benchmarks/bench_tips.py --quick  # one round of each, to see that it runs

A tip is a pair of variants of the same training, which take turns. The figure is the median over the rounds of the
ratio of their times. For "accumulation", two processes share the machine's cores and synchronise over gloo.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import _measure
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

WIDTH, DEPTH, ROWS, BATCHES = 512, 4, 128, 8
# What a sample waits for a disk or a store.
READ_SECONDS = 0.001
ROUNDS = 7

# Two variants, and what is called after each of them, outside of the measured time.
Pair = tuple[Callable[[], object], ...]


class Block(nn.Module):
    """A gated layer with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The output, of the shape of the input."""
        hidden = self.up(self.norm(x))
        return x + self.down(nn.functional.gelu(hidden, approximate="tanh") * torch.sigmoid(hidden))


class Samples(Dataset[torch.Tensor]):
    """Rows of numbers, each of which takes a time to read."""

    def __init__(self, rows: int, seconds: float) -> None:
        self.seconds, self.rows = seconds, torch.randn(BATCHES * rows, WIDTH)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.seconds:
            time.sleep(self.seconds)
        return self.rows[index]


class Training:
    """A model, an optimizer and a loader, prepared by an Accelerator of its own."""

    def __init__(self, rows: int = ROWS, seconds: float = 0.0, workers: int = 0, **settings: Any) -> None:
        from accel import Accelerator
        from accel_state import AcceleratorState

        # The variants take turns in one process; two precisions are allowed one after the other only.
        AcceleratorState._reset_state()
        torch.manual_seed(0)
        self.accelerator = Accelerator(cpu=True, **settings)
        model = nn.Sequential(*(Block() for _ in range(DEPTH)))
        loader = DataLoader(Samples(rows, seconds), rows, num_workers=workers, persistent_workers=workers > 0)
        optimizer = torch.optim.AdamW(model.parameters())
        self.model, self.optimizer, self.loader = self.accelerator.prepare(model, optimizer, loader)

    def epoch(self) -> None:
        """Train on every batch once."""
        for batch in self.loader:
            with self.accelerator.accumulate(self.model):
                self.accelerator.backward(self.model(batch).square().mean())
                self.optimizer.step()
                self.optimizer.zero_grad()


@contextmanager
def data() -> Iterator[Pair]:
    """Worker processes read the next batches while the model computes."""
    yield Training(seconds=READ_SECONDS).epoch, Training(seconds=READ_SECONDS, workers=2).epoch


@contextmanager
def compiled() -> Iterator[Pair]:
    """torch.compile fuses what is between two products."""
    yield Training().epoch, Training(dynamo_backend="inductor").epoch


@contextmanager
def precision() -> Iterator[Pair]:
    """Products of bfloat16."""
    yield Training().epoch, Training(mixed_precision="bf16").epoch


@contextmanager
def accumulation() -> Iterator[Pair]:
    """Gradients are sent once for four micro batches; run in each of two processes."""
    from accel import GradientAccumulationPlugin

    every = GradientAccumulationPlugin(num_steps=4, sync_each_batch=True)
    few = 8  # small micro batches, as where memory is short: sending weighs most
    yield (
        Training(few, gradient_accumulation_plugin=every).epoch,
        Training(few, gradient_accumulation_steps=4).epoch,
    )


@contextmanager
def overlap() -> Iterator[Pair]:
    """A state is written while training goes on: the time for which the loop stands still."""
    training = Training()
    training.epoch()  # gives the optimizer its state
    save, wait = training.accelerator.save_state, training.accelerator.wait_for_save
    with tempfile.TemporaryDirectory() as folder:
        # The save before is complete, as in a loop that saves more rarely than a save takes.
        yield lambda: save(f"{folder}/blocking"), lambda: save(f"{folder}/background", blocking=False), wait
        training.accelerator.end_training()


TIPS = {
    "data": (data, "num_workers=0", "num_workers=2"),
    "compile": (compiled, "eager", 'dynamo_backend="inductor"'),
    "precision": (precision, "float32", 'mixed_precision="bf16"'),
    "accumulation": (accumulation, "gradients sent per micro batch", "per window of 4"),
    "overlap": (overlap, "save_state()", "save_state(blocking=False)"),
}


def measured(name: str, rounds: int) -> dict[str, float]:
    """Median seconds of both variants, and the median of the ratios of a round."""
    times: _measure.Times = {"before": [], "after": []}
    with TIPS[name][0]() as (before, after, *settle):
        for turn in range(-1, rounds):
            for label, variant in (("before", before), ("after", after)):
                begin = time.perf_counter()
                variant()
                took = time.perf_counter() - begin
                if turn >= 0:
                    times[label].append(took)
                for wait in settle:
                    wait()
    seconds = {label: statistics.median(values) for label, values in times.items()}
    return {**seconds, "ratio": _measure.ratio(times, "before", "after")}


def main() -> None:
    """Measure each tip in processes of its own."""
    parser = argparse.ArgumentParser(description="What each tip of docs/guides/performance.md gains on this machine.")
    parser.add_argument("--quick", action="store_true", help="one round of each")
    parser.add_argument("--worker", choices=TIPS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    rounds = 1 if options.quick else ROUNDS
    if options.worker:
        _measure.report(measured(options.worker, rounds))
        return
    print("| tip | before | after | faster |\n| --- | ---: | ---: | ---: |")
    quick = ["--quick"] if options.quick else []
    for name, (_, before, after) in TIPS.items():
        processes = 2 if name == "accumulation" else 1
        figures = _measure.worker(sys.executable, __file__, "--worker", name, *quick, processes=processes)
        shown = [f"{label}: {figures[key] * 1e3:.0f} ms" for key, label in (("before", before), ("after", after))]
        print(f"| {name} | {shown[0]} | {shown[1]} | {figures['ratio']:.2f} x |", flush=True)


if __name__ == "__main__":
    main()

"""The time per batch of a prepared loader, relative to the same loader in plain PyTorch.

    python benchmarks/bench_loader.py

The samples are tiny, so the figures show the overhead of the loader itself.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import _measure
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

TARGET = 1.10
BATCHES = 300
BATCH_SIZE = 32
ROUNDS = 25
WORLD = 8


class Rows(Dataset):
    """Map-style: a sample is a dictionary of a few numbers and a label."""

    def __init__(self, length: int) -> None:
        self.inputs, self.labels = torch.randn(length, 8), torch.randint(4, (length,))

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"inputs": self.inputs[index], "labels": self.labels[index]}


class Stream(IterableDataset):
    """The same samples as an iterable data set."""

    def __init__(self, length: int) -> None:
        self.rows = Rows(length)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return map(self.rows.__getitem__, range(len(self.rows)))


def through(loader: Iterable) -> Callable[[], None]:
    """A function that iterates over the loader once."""

    def run() -> None:
        for _ in loader:
            pass

    return run


def cases(prepare: Callable[..., Any]) -> dict[str, tuple[Iterable, Iterable]]:
    """The cases: name -> (plain loader, prepared loader)."""
    rows, stream, device = Rows(BATCHES * BATCH_SIZE), Stream(BATCHES * BATCH_SIZE), torch.device("cpu")
    many = Rows(BATCHES * BATCH_SIZE * WORLD)
    alone = {"device": device, "num_processes": 1, "process_index": 0, "put_on_device": True}
    one_of_many = {"device": device, "num_processes": WORLD, "process_index": 3, "put_on_device": True, "rng_types": []}
    share = DistributedSampler(many, num_replicas=WORLD, rank=3, shuffle=False)

    def loader(data: Dataset, **settings: Any) -> DataLoader:
        return DataLoader(data, batch_size=BATCH_SIZE, **settings)

    return {
        "in order": (loader(rows), prepare(loader(rows), **alone)),
        "shuffled": (loader(rows, shuffle=True), prepare(loader(rows, shuffle=True), **alone)),
        "shuffled by seed": (
            loader(rows, shuffle=True),
            prepare(loader(rows, shuffle=True), use_seedable_sampler=True, **alone),
        ),
        "iterable": (loader(stream), prepare(loader(stream), **alone)),
        f"one of {WORLD} ranks": (loader(many, sampler=share), prepare(loader(many), **one_of_many)),
    }


def work(library: str) -> None:
    """Measure one library in this process."""
    torch.set_num_threads(1)
    package = importlib.import_module(library)
    package.PartialState(cpu=True)
    prepare = importlib.import_module(f"{library}.data_loader").prepare_data_loader
    figures = {}
    for name, (raw, prepared) in cases(prepare).items():
        times = _measure.in_turns({"raw": through(raw), "prepared": through(prepared)}, ROUNDS)
        figures[name] = {
            "raw": sorted(times["raw"])[ROUNDS // 2] / BATCHES * 1e6,
            "ratio": _measure.ratio(times, "prepared"),
        }
    _measure.report(figures)


def main() -> None:
    """Print the tables and compare the figures with the targets."""
    found = {
        label: _measure.worker(python, __file__, "--library", module)
        for label, (python, module) in _measure.libraries().items()
    }
    _measure.heading(f"A batch of {BATCH_SIZE} small samples from a prepared loader")
    for name, figures in found["accel"].items():
        _measure.row(f"{name}: raw DataLoader", f"{figures['raw']:.0f} us")
        for label, all_figures in found.items():
            figure = all_figures[name]["ratio"]
            target = f"target: at most {TARGET:.2f}: {_measure.verdict(figure, TARGET)}"
            _measure.row(f"{name}: {label}, relative to raw", f"{figure:.3f} x", target if label == "accel" else "")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--library", help="measure this library in this process (used internally for the worker processes)"
    )
    chosen = parser.parse_args().library
    work(chosen) if chosen else main()

"""Resuming at 90% of an epoch: the time to the first batch, relative to reading and dropping all earlier batches.

    python benchmarks/bench_skip.py

The samples are compressed images that are decompressed when they are read, so reading has a realistic cost.
"""

from __future__ import annotations

import argparse
import importlib
import zlib
from collections.abc import Callable
from itertools import islice
from typing import Any

import _measure
import torch
from torch.utils.data import DataLoader, Dataset

# One batch is read instead of 901; the rest is the start of an epoch.
TARGET = 0.02
BATCHES = 1000
SKIPPED = 900
BATCH_SIZE = 8
ROUNDS = 9
PIXELS = 64 * 64


class Compressed(Dataset):
    """Compressed images of 64 x 64 bytes; counts the reads."""

    def __init__(self, length: int) -> None:
        dice = torch.Generator().manual_seed(0)
        self.packed = [
            zlib.compress(bytes(torch.randint(4, (PIXELS,), generator=dice).tolist())) for _ in range(length)
        ]
        self.reads = 0

    def __len__(self) -> int:
        return len(self.packed)

    def __getitem__(self, index: int) -> torch.Tensor:
        self.reads += 1
        return torch.frombuffer(bytearray(zlib.decompress(self.packed[index])), dtype=torch.uint8).view(64, 64)


def work(library: str) -> None:
    """Measure one library in this process."""
    torch.set_num_threads(1)
    accelerator = importlib.import_module(library).Accelerator(cpu=True)
    data = Compressed(BATCHES * BATCH_SIZE)
    plain = DataLoader(data, batch_size=BATCH_SIZE)
    prepared = accelerator.prepare(DataLoader(data, batch_size=BATCH_SIZE))

    def drop() -> torch.Tensor:
        return next(islice(plain, SKIPPED, None))

    def skip() -> torch.Tensor:
        return next(iter(accelerator.skip_first_batches(prepared, SKIPPED)))

    assert torch.equal(drop(), skip()), "wrong batch after the skip"
    reads = {name: _reads_of(data, run) for name, run in (("raw", drop), ("skip", skip))}
    times = _measure.in_turns({"raw": drop, "skip": skip}, ROUNDS)
    raw = sorted(times["raw"])[ROUNDS // 2] * 1e3
    _measure.report({"raw": raw, "ratio": _measure.ratio(times, "skip"), "reads": reads})


def _reads_of(data: Compressed, run: Callable[[], Any]) -> int:
    before = data.reads
    run()
    return data.reads - before


def main() -> None:
    """Print the table and compare the figure with the target."""
    found = {
        label: _measure.worker(python, __file__, "--library", module)
        for label, (python, module) in _measure.libraries().items()
    }
    _measure.heading(f"The first batch after {SKIPPED} of {BATCHES}, {BATCH_SIZE} samples each")
    ours = found["accel"]
    _measure.row("read and drop", f"{ours['raw']:.1f} ms", f"reads {ours['reads']['raw']} samples")
    for label, figures in found.items():
        note = f"reads {figures['reads']['skip']} samples"
        if label == "accel":
            note += f"; target: at most {TARGET:.2f}: {_measure.verdict(figures['ratio'], TARGET)}"
        _measure.row(f"{label}: skip_first_batches", f"{figures['ratio']:.4f} x", note)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--library", help="measure this library in this process (used internally for the worker processes)"
    )
    chosen = parser.parse_args().library
    work(chosen) if chosen else main()

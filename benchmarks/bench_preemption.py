"""The overhead of saving on signals and of exact worker random states during normal training.

    python benchmarks/bench_preemption.py

First, the extra time per step of an empty loop with `save_on_signal`, in one process and on two ranks, where each rank
polls the process group's store about four times per second. Then a pass over a loader with two worker processes that
augment their samples, relative to plain PyTorch.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from typing import Any

import _measure
import torch
from torch.utils.data import DataLoader, Dataset

from accel import Accelerator
from accel.preemption.handler import PreemptionHandler, SaveOnSignal

TARGET_MICROSECONDS = 20.0
STEPS = 2000
ROUNDS = 15


class Rows(Dataset):
    """Random rows, with added noise if ``augment`` is set."""

    def __init__(self, length: int, augment: bool = False) -> None:
        self.rows, self.augment = torch.randn(length, 64), augment

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.rows[index] + torch.randn(64) if self.augment else self.rows[index]


def through(loader: Any) -> None:
    for _ in loader:
        pass


def work() -> None:
    """Measure the extra microseconds per step in this process."""
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True, project_dir=tempfile.mkdtemp())
    loader = accelerator.prepare(DataLoader(Rows(STEPS * accelerator.num_processes), batch_size=1))
    watching: list[PreemptionHandler] = []

    def watched() -> None:
        watching.append(PreemptionHandler(SaveOnSignal(), accelerator))
        through(loader)
        watching.pop().remove()

    times = _measure.in_turns({"raw": lambda: through(loader), "watched": watched}, ROUNDS, clock=time.perf_counter)
    if accelerator.is_main_process:
        _measure.report(_measure.extra(times, "watched") / STEPS * 1e6)
    accelerator.end_training()


def workers() -> float:
    """The time of a pass of a prepared loader with augmenting workers, relative to a plain one."""
    data = Rows(6400, augment=True)
    settings: dict[str, Any] = {"batch_size": 32, "num_workers": 2, "persistent_workers": True}
    accelerator = Accelerator(cpu=True)
    plain, prepared = DataLoader(data, **settings), accelerator.prepare(DataLoader(data, **settings))
    times = _measure.in_turns(
        {"raw": lambda: through(plain), "prepared": lambda: through(prepared)}, ROUNDS, clock=time.perf_counter
    )
    accelerator.end_training()
    return _measure.ratio(times, "prepared")


def main() -> None:
    """Print the tables and compare the figures with the targets."""
    import sys

    _measure.heading("Overhead without a signal")
    for processes in (1, 2):
        figure = _measure.worker(sys.executable, __file__, "--work", processes=processes)
        target = f"target: at most {TARGET_MICROSECONDS:.0f} us: {_measure.verdict(figure, TARGET_MICROSECONDS)}"
        _measure.row(
            f"save_on_signal, {processes} process{'es' if processes > 1 else ''}", f"{figure:.2f} us per step", target
        )
    _measure.row("augmenting workers, relative to plain PyTorch", f"{workers():.3f} x")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--work", action="store_true", help="measure in this process (used internally for the worker processes)"
    )
    work() if parser.parse_args().work else main()

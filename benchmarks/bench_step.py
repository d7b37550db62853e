"""The overhead of a training step over plain PyTorch: in one process, and with DDP on two.

    python benchmarks/bench_step.py
    python benchmarks/bench_step.py --gpu       # one process on this machine's GPU or another accelerator

One process: a tiny model, so that the step is mostly overhead, in a loop of loader, accumulate, forward, backward,
optimizer, scheduler and zero_grad. Two processes: a model with steps of a few milliseconds, with DDP over gloo.
"""

from __future__ import annotations

import argparse
import importlib
import os
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import _measure
import torch
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

MICROSECONDS_TARGET = 20.0
DDP_TARGET = 1.03
STEPS = 500
ROUNDS = 16
DDP_STEPS = 20
DDP_ROUNDS = 36


def parts(
    width: int, depth: int, batches: int, batch_size: int, sampler: Callable[[TensorDataset], Any] | None = None
) -> tuple:
    """A model, its optimizer, scheduler and loader; identical at each call."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *[layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.GELU())], nn.Linear(width, 4)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    data = TensorDataset(torch.randn(batches * batch_size, width), torch.randint(4, (batches * batch_size,)))
    loader = DataLoader(data, batch_size=batch_size, sampler=None if sampler is None else sampler(data))
    return model, optimizer, scheduler, loader


def moved(loader: Iterable, device: torch.device) -> Iterable:
    """The batches of a loader on a device, as a plain loop moves them."""
    for batch in loader:
        yield [tensor.to(device) for tensor in batch]


def plain_epoch(
    model: nn.Module, optimizer: Any, scheduler: Any, loader: Iterable, device: torch.device | None = None
) -> Callable[[], None]:
    """A function that runs an epoch in plain PyTorch."""
    model.to(device)

    def run() -> None:
        epoch = loader if device is None else moved(loader, device)
        for inputs, labels in epoch:
            loss = functional.cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

    return run


def prepared_epoch(
    accelerator: Any, model: nn.Module, optimizer: Any, scheduler: Any, loader: Iterable
) -> Callable[[], None]:
    """A function that runs the same epoch with prepared objects."""

    def run() -> None:
        for inputs, labels in loader:
            with accelerator.accumulate(model):
                loss = functional.cross_entropy(model(inputs), labels)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

    return run


def figures_of(times: _measure.Times, steps: int) -> dict[str, float]:
    """Microseconds per step of plain PyTorch, the overhead, the ratio, and the noise (plain PyTorch against itself)."""
    scale = 1e6 / steps
    return {
        "raw": statistics.median(times["raw"]) * scale,
        "extra": _measure.extra(times, "prepared") * scale,
        "ratio": _measure.ratio(times, "prepared"),
        "noise": _measure.ratio(times, "raw again"),
    }


def in_one_process(accelerator: Any) -> dict[str, float]:
    """Time a step that is mostly overhead."""
    sizes = {"width": 4, "depth": 1, "batches": STEPS, "batch_size": 2}
    variants = {
        "raw": plain_epoch(*parts(**sizes)),
        "prepared": prepared_epoch(accelerator, *accelerator.prepare(*parts(**sizes))),
        "raw again": plain_epoch(*parts(**sizes)),
    }
    return figures_of(_measure.in_turns(variants, ROUNDS), STEPS)


def in_two_processes(accelerator: Any) -> dict[str, float]:
    """Time a step with DDP in the Accelerator's process group."""
    sizes = {"width": 256, "depth": 6, "batches": DDP_STEPS * 2, "batch_size": 64}

    def plain() -> Callable[[], None]:
        model, *others = parts(**sizes, sampler=lambda data: DistributedSampler(data, shuffle=False))
        return plain_epoch(DistributedDataParallel(model), *others)

    variants = {
        "raw": plain(),
        "prepared": prepared_epoch(accelerator, *accelerator.prepare(*parts(**sizes))),
        "raw again": plain(),
    }
    # Wall-clock time, because the ranks wait for each other.
    return figures_of(_measure.in_turns(variants, DDP_ROUNDS, clock=time.perf_counter), DDP_STEPS)


def on_a_gpu(accelerator: Any) -> dict[str, float]:
    """The same step with the model on an accelerator; the host waits for the device at the end of an epoch."""
    sizes, device = {"width": 4, "depth": 1, "batches": STEPS, "batch_size": 2}, accelerator.device

    def until_done(epoch: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            epoch()
            torch.accelerator.synchronize(device)

        return run

    variants = {
        "raw": plain_epoch(*parts(**sizes), device),
        "prepared": prepared_epoch(accelerator, *accelerator.prepare(*parts(**sizes))),
        "raw again": plain_epoch(*parts(**sizes), device),
    }
    epochs = {name: until_done(epoch) for name, epoch in variants.items()}
    return figures_of(_measure.in_turns(epochs, ROUNDS, clock=time.perf_counter), STEPS)


def work(library: str, gpu: bool) -> None:
    """Measure one library in this process."""
    torch.set_num_threads(1)
    if gpu:
        os.environ.pop("ACCELERATE_USE_CPU", None)
    accelerator = importlib.import_module(library).Accelerator(cpu=not gpu)
    if gpu:
        _measure.report(on_a_gpu(accelerator))
    elif accelerator.num_processes == 1:
        _measure.report(in_one_process(accelerator))
    else:
        figures = in_two_processes(accelerator)
        if accelerator.is_main_process:
            _measure.report(figures)
    accelerator.end_training()


def show_overheads(title: str, figures_by_library: dict[str, dict[str, float]]) -> None:
    """Print microseconds of a step in one process."""
    _measure.heading(title)
    ours = figures_by_library["accel"]
    _measure.row("raw PyTorch", f"{ours['raw']:.0f} us", f"(noise: {(ours['noise'] - 1) * ours['raw']:+.1f} us)")
    for label, figures in figures_by_library.items():
        target = (
            f"target: at most {MICROSECONDS_TARGET:.0f} us: {_measure.verdict(figures['extra'], MICROSECONDS_TARGET)}"
        )
        _measure.row(f"{label}, overhead", f"{figures['extra']:+.1f} us", target if label == "accel" else "")


def main(gpu: bool) -> None:
    """Print the tables and compare the figures with the targets."""
    found = _measure.libraries()
    if gpu:
        workers = found.items()
        show_overheads(
            f"A step in one process on {torch.accelerator.current_accelerator()}",
            {
                label: _measure.worker(python, __file__, "--gpu", "--library", module)
                for label, (python, module) in workers
            },
        )
        return
    one = {label: _measure.worker(python, __file__, "--library", module) for label, (python, module) in found.items()}
    two = {
        label: _measure.worker(python, __file__, "--library", module, processes=2)
        for label, (python, module) in found.items()
    }

    show_overheads("A step in one process", one)
    _measure.heading("A step with DDP on two processes")
    ours = two["accel"]
    _measure.row("raw DDP", f"{ours['raw']:.0f} us", f"(noise: {ours['noise']:.3f} x)")
    for label, figures in two.items():
        target = f"target: at most {DDP_TARGET:.2f}: {_measure.verdict(figures['ratio'], DDP_TARGET)}"
        _measure.row(f"{label}, relative to raw", f"{figures['ratio']:.3f} x", target if label == "accel" else "")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--library", help="measure this library in this process (used internally for the worker processes)"
    )
    parser.add_argument("--gpu", action="store_true", help="in one process on an accelerator")
    given = parser.parse_args()
    if given.gpu and not torch.accelerator.is_available():
        parser.error("--gpu: this machine has no accelerator that torch can use. Leave it out to measure on the CPU.")
    work(given.library, given.gpu) if given.library else main(given.gpu)

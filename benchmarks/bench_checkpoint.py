"""The time of a checkpoint, relative to torch.save and torch.load of the same tensors.

    python benchmarks/bench_checkpoint.py [--megabytes 512] [--folder .]

The state is that of AdamW: the weights, and two averages of the same size. Plain PyTorch saves the two state dicts to
two files with fsync (without it, a crash of the machine can lose them), and loads them into a model and an optimizer.
The times of accel also include digests, the manifest, random generator states, and the verification of every byte
before anything is loaded. Both write to the same file system, which --folder selects. The reference has none of these,
and no fsync: "without digests and fsync" is accel without them, relative to the reference.

"training during a save" is the speed of a loop of small layers, which needs the interpreter all the time as loops on
accelerators do, while a save with blocking=False is written, relative to the same loop without one.
"""

from __future__ import annotations

import argparse
import importlib
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import _measure
import torch
from torch import nn

SAVE_TARGET = 1.1
LOAD_TARGET = 1.1
BLOCKED_TARGET = 1 / 3
TRAINING_TARGET = 0.97
ROUNDS = 7
WIDTH = 1024


def trained(megabytes: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and an optimizer whose states have this size together."""
    layers = max(1, megabytes * 2**20 // (3 * 4 * WIDTH * WIDTH))
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)])
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def plain_save(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Save with torch.save and fsync."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name, state in (("model.pt", model.state_dict()), ("optimizer.pt", optimizer.state_dict())):
        with open(folder / name, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())


def plain_load(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Load with torch.load."""
    model.load_state_dict(torch.load(folder / "model.pt", weights_only=True))
    optimizer.load_state_dict(torch.load(folder / "optimizer.pt", weights_only=True))


def variants_of_saving(
    accelerator: Any, model: nn.Module, optimizer: Any, place: Path, asynchronous: bool
) -> dict[str, Any]:
    """The functions to time."""
    prepared = accelerator.prepare(model, optimizer)

    def save() -> None:
        shutil.rmtree(place / "state", ignore_errors=True)
        accelerator.save_state(str(place / "state"))

    plain_model, plain_optimizer = accelerator.unwrap_model(prepared[0]), prepared[1].optimizer
    variants = {"raw": lambda: plain_save(plain_model, plain_optimizer, place / "plain"), "saved": save}
    if asynchronous:
        import _undigested

        def bare() -> None:
            with _undigested.saving():
                save()

        # After it "saved" writes what is loaded.
        variants = {"raw": variants["raw"], "bare": bare, "saved": save}
        variants["blocked"] = lambda: accelerator.save_state(str(place / "beside"), blocking=False)
        variants["rest"] = accelerator.wait_for_save
    return variants


def measure(library: str, megabytes: int, parent: str) -> dict[str, Any]:
    """The figures of one library."""
    accelerator = importlib.import_module(library).Accelerator(cpu=True)
    place = Path(tempfile.mkdtemp(prefix="bench-checkpoint-", dir=parent))
    try:
        asynchronous = hasattr(accelerator, "wait_for_save")
        variants = variants_of_saving(accelerator, *trained(megabytes), place, asynchronous)
        saving = in_order(variants, ROUNDS)
        raw_model, raw_optimizer = accelerator._models[0], accelerator._optimizers[0].optimizer

        def load() -> None:
            accelerator.load_state(str(place / "state"))

        to_load = {"raw": lambda: plain_load(raw_model, raw_optimizer, place / "plain"), "loaded": load}
        if asynchronous:
            import _undigested

            def unchecked() -> None:
                with _undigested.loading():
                    load()

            to_load["unchecked"] = unchecked
        loading = _measure.in_turns(to_load, ROUNDS, clock=time.perf_counter)
        figures = {"raw_save": statistics.median(saving["raw"]), "raw_load": statistics.median(loading["raw"])}
        figures |= {"save": _measure.ratio(saving, "saved"), "load": _measure.ratio(loading, "loaded")}
        if asynchronous:
            figures |= {
                "bare": _measure.ratio(saving, "bare"),
                "unchecked": _measure.ratio(loading, "unchecked"),
                "blocked": _measure.ratio(saving, "blocked"),
                "first_blocked": saving["first blocked"][0] / saving["raw"][0],
                "training": training_during_saves(accelerator, place),
            }
        return figures
    finally:
        shutil.rmtree(place)


def training_during_saves(accelerator: Any, place: Path) -> float:
    """The speed of a loop while a save is written, relative to the same loop without one: the median of rounds."""
    model = nn.Sequential(*[nn.Linear(32, 32) for _ in range(40)])
    inputs = torch.randn(8, 32)

    def speed(goes_on: Callable[[int], bool]) -> float:
        steps, begin = 0, time.perf_counter()
        while goes_on(steps):
            model(inputs).sum().backward()
            steps += 1
        return steps / (time.perf_counter() - begin)

    speed(lambda steps: steps < 50)
    ratios = []
    for _ in range(ROUNDS):
        os.sync()
        before = speed(lambda steps: steps < 300)
        accelerator.save_state(str(place / "during"), blocking=False)
        during = speed(lambda steps: accelerator.save_in_flight)
        accelerator.wait_for_save()
        os.sync()
        after = speed(lambda steps: steps < 300)
        ratios.append(2 * during / (before + after))
    return statistics.median(ratios)


def in_order(variants: dict[str, Any], rounds: int) -> _measure.Times:
    """Seconds of each variant in each round, in a fixed order: "rest" waits for what "blocked" has started."""
    times: _measure.Times = {name: [] for name in variants}
    times["first blocked"] = []
    for turn in range(-1, rounds):
        for name, variant in variants.items():
            os.sync()  # so that pending writes do not slow this variant down
            begin = time.perf_counter()
            variant()
            took = time.perf_counter() - begin
            if turn >= 0:
                times[name].append(took)
            elif name == "blocked":
                times["first blocked"].append(took)
    return times


def main(megabytes: int, parent: str) -> None:
    """Print the tables and compare the figures with the targets."""
    found = _measure.libraries()
    words = ("--megabytes", str(megabytes), "--folder", parent)
    figures = {
        label: _measure.worker(python, __file__, "--library", module, *words)
        for label, (python, module) in found.items()
    }
    ours = figures["accel"]
    _measure.heading(f"A checkpoint of {megabytes} MiB (one third weights, two thirds AdamW state)")
    _measure.row(
        "torch.save and fsync", f"{ours['raw_save'] * 1e3:.0f} ms", f"{megabytes / 1024 / ours['raw_save']:.2f} GiB/s"
    )
    _measure.row(
        "torch.load and load_state_dict",
        f"{ours['raw_load'] * 1e3:.0f} ms",
        f"{megabytes / 1024 / ours['raw_load']:.2f} GiB/s",
    )
    for what, target in (("save", SAVE_TARGET), ("load", LOAD_TARGET), ("blocked", BLOCKED_TARGET)):
        for label, of_one in figures.items():
            if what in of_one:
                note = (
                    f"target: at most {target:.2f}: {_measure.verdict(of_one[what], target)}"
                    if label == "accel"
                    else ""
                )
                _measure.row(f"{label}: {what}, relative to torch", f"{of_one[what]:.3f} x", note)
    for what, bare, name in (("save", "bare", "digests and fsync"), ("load", "unchecked", "comparing digests")):
        note = f"of accel's time {1 - ours[bare] / ours[what]:.0%} is for them"
        _measure.row(f"accel: {what} without {name}, relative to torch", f"{ours[bare]:.3f} x", note)
        if "reference" in figures:
            ratio = ours[bare] / figures["reference"][what]
            note = f"target: at most 1.00: {_measure.verdict(ratio, 1.0)}"
            _measure.row("the same, relative to the reference", f"{ratio:.3f} x", note)
    _measure.row(
        "accel: training during a save, relative to without one",
        f"{ours['training']:.3f} x",
        f"target: at least {TRAINING_TARGET}: {'met' if ours['training'] >= TRAINING_TARGET else 'MISSED'}",
    )
    _measure.row(
        "accel: blocked by the first save",
        f"{ours['first_blocked']:.3f} x",
        "allocates the buffers that later saves reuse",
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=384, help="size of the state")
    parser.add_argument(
        "--folder", default=tempfile.gettempdir(), help="where to write (default: the temporary directory)"
    )
    parser.add_argument(
        "--library", help="measure this library in this process (used internally for the worker processes)"
    )
    chosen = parser.parse_args()
    if chosen.library:
        _measure.report(measure(chosen.library, chosen.megabytes, chosen.folder))
    else:
        main(chosen.megabytes, chosen.folder)

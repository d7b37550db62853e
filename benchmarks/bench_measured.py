"""Plain PyTorch, the reference and accel in one run: the figures of "Measured" in the README.

    python benchmarks/bench_measured.py                # prints the table
    python benchmarks/bench_measured.py --write        # also docs/measured.json, and draws the chart anew

Each figure is a median of rounds in which the three take turns, in processes of their own. "Resume" is measured after a
kill: a run that has trained 900 of the 1000 batches of an epoch saves its state and gets SIGKILL; the time is that from
the call that loads the state to the end of the next step, which must be of batch 900.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import os
import platform
import runpy
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path
from typing import Any

import _measure
import psutil
import torch
from bench_bigmodel import Model, width_for
from bench_launch import measure as measure_launch
from bench_skip import BATCH_SIZE, BATCHES, PIXELS, SKIPPED, Compressed
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import DataLoader

ROOT = Path(__file__).parents[1]
RESULTS, DRAWING = ROOT / "docs" / "measured.json", ROOT / "docs" / "measured.py"
RAW = "torch"
ROUNDS = 5
MEGABYTES, GIGABYTES = 384, 1.6
SAVING = "accel flushes to the disk and hashes every byte; plain PyTorch is flushed too; Accelerate does not flush."

Figures = dict[str, float]


class Numbered(Compressed):
    """Compressed images with their number."""

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:  # type: ignore[override]
        return index, super().__getitem__(index).float().flatten() / 4


def parts() -> tuple[nn.Module, torch.optim.Optimizer, DataLoader]:
    """What the run trains, the same at each call."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(PIXELS, 128), nn.ReLU(), nn.Linear(128, 1))
    return model, torch.optim.AdamW(model.parameters()), DataLoader(Numbered(BATCHES * BATCH_SIZE), BATCH_SIZE)


def train_and_die(library: str, folder: Path) -> None:
    """Train up to batch 900, save, and get a signal that no program can handle."""
    model, optimizer, loader = parts()
    accelerator = None
    if library != RAW:
        accelerator = importlib.import_module(library).Accelerator(cpu=True)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for done, (_, images) in enumerate(loader, start=1):
        loss = model(images).square().mean()
        loss.backward() if accelerator is None else accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if done == SKIPPED:
            if accelerator is not None:
                accelerator.save_state(str(folder / "state"))
            else:
                torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / "state.pt")
            os.kill(os.getpid(), signal.SIGKILL)


def resume(library: str, folder: Path) -> None:
    """Report the seconds from the load of the state to the end of the next step."""
    model, optimizer, loader = parts()
    if library == RAW:
        begin = time.perf_counter()
        state = torch.load(folder / "state.pt", weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        batches = islice(loader, SKIPPED, None)
    else:
        accelerator = importlib.import_module(library).Accelerator(cpu=True)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        begin = time.perf_counter()
        accelerator.load_state(str(folder / "state"))
        batches = iter(loader if library == "accel" else accelerator.skip_first_batches(loader, SKIPPED))
    numbers, images = next(batches)
    loss = model(images).square().mean()
    loss.backward() if library == RAW else accelerator.backward(loss)
    optimizer.step()
    seconds = time.perf_counter() - begin
    assert numbers[0] == SKIPPED * BATCH_SIZE, f"{library} continued with sample {numbers[0]}"
    _measure.report(seconds)


def steps(libraries: dict[str, tuple[str, str]]) -> Figures:
    """Microseconds of a step that is mostly overhead."""
    script, figures = str(Path(__file__).with_name("bench_step.py")), {}
    for label, (python, module) in libraries.items():
        found = _measure.worker(python, script, "--library", module)
        figures.setdefault(RAW, found["raw"])
        # Relative to the raw step of the first: that of another process differs by noise only.
        figures[label] = figures[RAW] + found["extra"]
    return figures


def loads(libraries: dict[str, tuple[str, str]], gigabytes: float, rounds: int) -> Figures:
    """Seconds from a file to the first forward of a large model."""
    script, times = str(Path(__file__).with_name("bench_bigmodel.py")), {}
    width = width_for(gigabytes)
    with tempfile.TemporaryDirectory() as folder:
        file = f"{folder}/model.safetensors"
        save_file(Model(width).state_dict(), file, metadata={"format": "pt"})
        for _ in range(rounds):
            for label, (python, module) in with_raw(libraries, "raw").items():
                module = {"accel": "accel_bigmodel"}.get(module, module)
                words = ("--part", "first", "--library", module, "--file", file, "--width", str(width))
                found = _measure.worker(python, script, *words, timeout=600)
                times.setdefault(label, []).append(min(item["seconds"] for item in found.values()))
    return medians(times)


def starts(libraries: dict[str, tuple[str, str]], rounds: int) -> Figures:
    """Seconds to start and end two processes that do nothing."""
    cpu = ["launch", "--cpu", "--num_processes", "2", "noop.py"]
    module = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "noop.py"]
    commands = {RAW: module}
    if "reference" in libraries:
        commands["reference"] = [libraries["reference"][0], "-m", "accelerate.commands.accelerate_cli", *cpu]
    commands["accel"] = [sys.executable, "-m", "accel_launch", *cpu]
    return medians(measure_launch(commands, rounds))


def saves(libraries: dict[str, tuple[str, str]], megabytes: int) -> Figures:
    """Seconds to save weights and AdamW state, until they are on the disk."""
    script, figures = str(Path(__file__).with_name("bench_checkpoint.py")), {}
    for label, (python, module) in libraries.items():
        words = ("--library", module, "--megabytes", str(megabytes), "--folder", tempfile.gettempdir())
        found = _measure.worker(python, script, *words, timeout=600)
        figures.setdefault(RAW, found["raw_save"])
        figures[label] = figures[RAW] * found["save"]
    return figures


def resumes(libraries: dict[str, tuple[str, str]], rounds: int) -> Figures:
    """Seconds from loading a state to the end of the next step, after a kill."""
    times: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as parent:
        found = with_raw(libraries, RAW)
        for label, (python, module) in found.items():
            (Path(parent) / label).mkdir()
            command = [
                python,
                __file__,
                "--part",
                "train_and_die",
                "--library",
                module,
                "--folder",
                f"{parent}/{label}",
            ]
            code = subprocess.run(command, env=_measure.environment(), timeout=300, check=False).returncode
            if code != -signal.SIGKILL:
                raise RuntimeError(f"{label} ended with {code} before it was killed")
        for _ in range(rounds):
            for label, (python, module) in found.items():
                words = ("--part", "resume", "--library", module, "--folder", f"{parent}/{label}")
                times.setdefault(label, []).append(_measure.worker(python, __file__, *words))
    return medians(times)


def with_raw(libraries: dict[str, tuple[str, str]], module: str) -> dict[str, tuple[str, str]]:
    """The libraries, after plain PyTorch."""
    return {RAW: (sys.executable, module), **libraries}


def medians(times: dict[str, list[float]]) -> Figures:
    return {label: statistics.median(seconds) for label, seconds in times.items()}


def machine() -> dict[str, str]:
    """What the figures were measured on."""
    model = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    reference = _measure.reference_python()
    version = ""
    if reference:
        code = "import importlib.metadata as m; print(m.version('accelerate'))"
        version = subprocess.run([reference, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    return {
        "processor": model,
        "cores": str(os.cpu_count()),
        "memory": f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__.partition("+")[0],
        "reference": version,
    }


def main(rounds: int, megabytes: int, gigabytes: float, write: bool) -> None:
    """Measure, print, and write the results."""
    found = _measure.libraries()
    libraries = {label: found[label] for label in ("reference", "accel") if label in found}
    rows: list[dict[str, Any]] = [
        {"name": "A training step of a tiny model", "unit": "us", **steps(libraries)},
        {
            "name": f"Load a model of {gigabytes:g} GB, first forward",
            "unit": "s",
            **loads(libraries, gigabytes, rounds),
        },
        {"name": "Start two processes", "unit": "s", **starts(libraries, rounds)},
        {"name": "Resume after a kill, at 90% of an epoch", "unit": "s", **resumes(libraries, rounds)},
        {"name": f"Save a state of {megabytes} MiB", "unit": "s", **saves(libraries, megabytes), "note": SAVING},
    ]
    _measure.heading(f"Plain PyTorch, the reference and accel in {rounds} rounds")
    for row in rows:
        for label in (RAW, *libraries):
            scaled = row[label] if row["unit"] == "us" else row[label] * 1e3
            text = f"{row[label] / row[RAW]:.2f} x torch"
            _measure.row(f"{row['name']}: {label}", f"{scaled:.0f} {'us' if row['unit'] == 'us' else 'ms'}", text)
    if write:
        today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
        words = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
        commit = subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip()
        content = {"date": today, "commit": commit, "machine": machine(), "rounds": rounds, "rows": rows}
        RESULTS.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        runpy.run_path(str(DRAWING), run_name="__main__")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--megabytes", type=int, default=MEGABYTES, help="size of the state that is saved")
    parser.add_argument("--gigabytes", type=float, default=GIGABYTES, help="size of the model that is loaded")
    parser.add_argument("--write", action="store_true", help="write docs/measured.json and the chart")
    parser.add_argument("--part", choices=("train_and_die", "resume"), help="used internally, as what follows")
    parser.add_argument("--library")
    parser.add_argument("--folder", type=Path)
    chosen = parser.parse_args()
    if chosen.part:
        torch.set_num_threads(1)
        {"train_and_die": train_and_die, "resume": resume}[chosen.part](chosen.library, chosen.folder)
    else:
        main(chosen.rounds, chosen.megabytes, chosen.gigabytes, chosen.write)

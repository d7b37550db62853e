"""How much code of this repository a reader crosses to follow one operation: distinct files and functions.

    python benchmarks/reading_path.py                # the table
    python benchmarks/reading_path.py --list save_state   # and what is in it

Each operation runs once in this process, on a small model with an optimizer, a scheduler and a loader, under
``sys.setprofile``, in threads too. The launch, of an empty script in two processes on the CPU, runs in a new process,
until both have been started. Counted are the functions of accel's packages, wherever they are installed: functions,
methods, properties, lambdas, comprehensions and generator expressions. Bodies of modules and classes are not counted:
they run when something is imported. To compare with another commit, put ``packages/*/src`` into PYTHONPATH.
"""

from __future__ import annotations

import argparse
import inspect
import os
import sys
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

LAUNCH = "launch of 2 processes"
OPERATIONS = ("training step", "Accelerator()", "prepare", "save_state", "load_state", "disk-offloaded forward", LAUNCH)


def _packages() -> tuple[str, ...]:
    """The folders of accel's packages: of this repository, or where pip has put them."""
    names = ("accel", *(f"accel_{name}" for name in "bigmodel checkpoint data fp8 launch state track".split()))
    found = [Path(spec.origin).parent for name in names if (spec := find_spec(name)) and spec.origin]
    return tuple(f"{folder}{os.sep}" for folder in found)


PACKAGES = _packages()


class Function(NamedTuple):
    """A function of this repository."""

    file: str
    line: int
    name: str


class Crossed:
    """A block that notes which code of this repository runs in it, and how often, until a function returns."""

    def __init__(self, until: str = "") -> None:
        self.calls: dict[Function, int] = {}
        self._until, self.is_over = until, False

    def __enter__(self) -> Crossed:
        threading.setprofile(self._note)
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        is_body = not code.co_flags & inspect.CO_NEWLOCALS
        if event == "call" and not self.is_over and not is_body and code.co_filename.startswith(PACKAGES):
            function = Function(code.co_filename, code.co_firstlineno, code.co_qualname)
            self.calls[function] = self.calls.get(function, 0) + 1
        self.is_over |= event == "return" and code.co_qualname == self._until

    @property
    def files(self) -> set[str]:
        """The distinct files."""
        return {function.file for function in self.calls}

    def listing(self) -> str:
        """Every function, by file."""
        lines = []
        for file in sorted(self.files):
            folder = next(folder for folder in PACKAGES if file.startswith(folder))
            lines.append(os.path.relpath(file, Path(folder).parent))
            named = sorted(function for function in self.calls if function.file == file)
            lines += [f"    {function.line:5} {function.name}" for function in named]
        return "\n".join(lines)


def _objects() -> tuple[nn.Module, torch.optim.Optimizer, Any, DataLoader[Any]]:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    data = TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
    return model, optimizer, scheduler, DataLoader(data, batch_size=4, shuffle=True)


def measure(folder: Path) -> dict[str, Crossed]:
    """Run every operation once, and return what each crossed."""
    from accel import Accelerator
    from accel_bigmodel import dispatch_model

    crossed = {name: Crossed() for name in OPERATIONS}
    with crossed["Accelerator()"]:
        accelerator = Accelerator(cpu=True)
    objects = _objects()
    with crossed["prepare"]:
        model, optimizer, scheduler, loader = accelerator.prepare(*objects)
    batches = iter(loader)

    def step() -> None:
        inputs, labels = next(batches)
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(inputs), labels)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

    step()
    _measure_second(crossed["training step"], step)
    with crossed["save_state"]:
        accelerator.save_state(folder / "state")
    with crossed["load_state"]:
        accelerator.load_state(folder / "state")
    accelerator.end_training()

    plain = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    device_map = {"0": "disk", "1": "cpu", "2": "disk"}
    dispatched = dispatch_model(plain, device_map, main_device="cpu", offload_dir=str(folder / "offload"))
    inputs = torch.randn(4, 8)

    def forward() -> None:
        with torch.no_grad():
            dispatched(inputs)

    forward()
    _measure_second(crossed["disk-offloaded forward"], forward)
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        crossed[LAUNCH] = pool.submit(_launch, folder / "script.py").result()
    return crossed


def _launch(script: Path) -> Crossed:
    from accel_launch.cli import main as accel

    script.touch()
    with Crossed(until="Agent._start") as crossed:
        code = accel(["launch", "--cpu", "--num_processes", "2", str(script)])
    if code or not crossed.is_over:
        raise RuntimeError(f"the launch ended with exit code {code}; Agent._start has returned: {crossed.is_over}")
    return crossed


def _measure_second(crossed: Crossed, action: Callable[[], None]) -> None:
    with crossed:
        action()


def main() -> None:
    parser = argparse.ArgumentParser(description="Distinct files and functions crossed by each operation.")
    parser.add_argument("--list", choices=OPERATIONS, help="list the functions of one operation")
    chosen = parser.parse_args().list
    with tempfile.TemporaryDirectory() as folder:
        crossed = measure(Path(folder))
    print("| operation | files | functions | calls |\n| --- | ---: | ---: | ---: |")
    for name, noted in crossed.items():
        print(f"| {name} | {len(noted.files)} | {len(noted.calls)} | {sum(noted.calls.values())} |")
    if chosen:
        print(f"\n{crossed[chosen].listing()}")


if __name__ == "__main__":
    main()

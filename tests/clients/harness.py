"""Runs cases of client libraries in one process each rank, and writes what they computed as JSON.

Which `accelerate` the libraries get is decided outside: the same file runs on accel (through accel_compat) and on the
reference.
"""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import importlib.util
import json
import os
import statistics
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

Case = Callable[[Path], Any]
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
# What a trainer logs about the time it took.
_TIMES = ("runtime", "per_second", "flos", "memory", "time")


# The CPU seconds of each step of the case that runs, on this rank; their lower quartiles are compared. Wall-clock times
# of milliseconds say more about what else the machine does.
STEP_SECONDS: list[float] = []
# Fewer say little: accel compares the shapes of the first collectives of the ranks, and libraries fill their caches.
ENOUGH_STEPS = 15


class StepClock:
    """Measures CPU time between the ends of consecutive steps; call it after each step, and pause it elsewhere."""

    def __init__(self) -> None:
        self.last: float | None = None

    def __call__(self) -> None:
        now = time.process_time()
        if self.last is not None:
            STEP_SECONDS.append(now - self.last)
        self.last = now

    def pause(self) -> None:
        self.last = None


def clock_of_trainer() -> Any:
    """A callback that measures the steps of a Trainer, with the loading of data, without evaluations and saves."""
    from transformers import TrainerCallback

    clock = StepClock()

    class Callback(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            clock()

        def _pause(self, *args: Any, **kwargs: Any) -> None:
            clock.pause()

        on_train_begin = on_epoch_begin = on_evaluate = on_prediction_step = on_save = _pause

    return Callback()


def timed(function: Callable[[], Any], count: int = 20) -> Any:
    """Call a function several times, and measure each call but the first."""
    clock = StepClock()
    for _ in range(count):
        result = function()
        clock()
    return result


class Cases:
    """The cases of a file, in order, each with the world sizes that it runs on."""

    def __init__(self) -> None:
        self.cases: dict[str, tuple[Case, tuple[int, ...]]] = {}

    def add(self, name: str, case: Case, worlds: Iterable[int] = (1, 2)) -> None:
        if name in self.cases:
            raise ValueError(f"two cases are called {name}")
        self.cases[name] = (case, tuple(worlds))

    def __call__(self, worlds: Iterable[int] = (1, 2)) -> Callable[[Case], Case]:
        return lambda case: (self.add(case.__name__, case, worlds), case)[1]


def main(cases: Cases) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default="*")
    parser.add_argument("--list", action="store_true")
    arguments = parser.parse_args()
    names = [name for name, (_, worlds) in cases.cases.items() if WORLD in worlds]
    names = [name for name in names if any(fnmatch.fnmatch(name, part) for part in arguments.only.split(","))]
    if arguments.list:
        print("\n".join(names))
        return
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    root = Path(os.environ["CASES_FOLDER"])
    results: dict[str, Any] = {"accelerate": importlib.util.find_spec("accelerate").origin}  # type: ignore[union-attr]
    for name in names:
        results[name] = _run(cases.cases[name][0], root / name)
        print(f"[{RANK}] {name}: {results[name].get('error') or 'done'} ({results[name]['seconds']} s)", flush=True)
        if RANK == 0:
            arguments.out.write_text(json.dumps(results, indent=1), encoding="utf-8")
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    sys.stdout.flush()
    os._exit(0)  # what a library leaves running must not keep the process


def _run(case: Case, folder: Path) -> dict[str, Any]:
    from accelerate.state import AcceleratorState, GradientState

    before = dict(os.environ)
    torch.manual_seed(0)
    STEP_SECONDS.clear()
    folder.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    result: dict[str, Any] = {}
    here = Path.cwd()
    os.chdir(folder)
    try:
        result["value"] = as_json(case(folder))
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        where = " < ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in reversed(frames[-4:]))
        result["error"] = f"{type(error).__name__}: {str(error)[:400]} ({where})"
        if os.environ.get("CASES_TRACEBACK"):
            traceback.print_exc()
    os.chdir(here)
    result["seconds"] = round(time.perf_counter() - start, 1)
    if len(STEP_SECONDS) >= ENOUGH_STEPS:
        result["step"] = statistics.quantiles(STEP_SECONDS, n=4)[0]
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    for name in set(os.environ) - set(before):
        del os.environ[name]
    os.environ.update(before)
    return result


def as_json(value: Any) -> Any:
    """Numbers as they are, tensors and modules as digests."""
    if isinstance(value, torch.nn.Module):
        return weights(value.state_dict())
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else [*value.detach().double().flatten()[:32].tolist(), digest(value)]
    if isinstance(value, dict):
        return {str(key): as_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [as_json(item) for item in value]
    if hasattr(value, "tolist"):
        return value.tolist()
    return value if isinstance(value, (int, float, str, bool, type(None))) else repr(value)


def digest(tensor: torch.Tensor) -> str:
    values = tensor.detach().cpu().contiguous().flatten()
    return "digest " + hashlib.sha256(values.view(torch.uint8).numpy().tobytes()).hexdigest()[:12]


def weights(state: dict[str, torch.Tensor]) -> dict[str, Any]:
    """A sum and a digest over all weights, by name."""
    tensors = {name: value for name, value in sorted(state.items()) if isinstance(value, torch.Tensor)}
    total = sum(value.double().abs().sum().item() for value in tensors.values())
    whole = hashlib.sha256("".join(name + digest(value) for name, value in tensors.items()).encode()).hexdigest()[:12]
    return {"sum": total, "digest": whole, "tensors": len(tensors)}


def history(trainer: Any) -> list[dict[str, Any]]:
    """What a trainer logged, without times."""
    return [
        {key: value for key, value in entry.items() if not any(word in key for word in _TIMES)}
        for entry in trainer.state.log_history
    ]


def files(folder: Path) -> list[str]:
    """The files below a folder."""
    found = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return sorted(path for path in found if ".tmp" not in path)

"""Runs cases of client libraries in one process each rank, and writes what they computed as JSON.

Which `accelerate` the libraries get is decided outside: the same file runs on accel (through accel_compat) and on the
reference.
"""

from __future__ import annotations

import argparse
import faulthandler
import fnmatch
import hashlib
import importlib
import importlib.util
import itertools
import json
import os
import random
import signal
import statistics
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy
import torch

Case = Callable[[Path], Any]
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
# What a trainer logs about the time it took.
_TIMES = ("runtime", "per_second", "flos", "memory", "time")
# A case that takes longer than this has hung: the process ends, and run.py goes on with the next case in a new one.
CASE_SECONDS = int(os.environ.get("CASES_SECONDS", 300))

# The CPU seconds of each step of the case that runs, on this rank; their lower quartiles are printed beside the result.
STEP_SECONDS: list[float] = []
# Fewer say little: accel compares the shapes of the first collectives of the ranks, and libraries fill their caches.
ENOUGH_STEPS = 15


class Measured(BaseException):
    """Ends a case whose steps have been measured often enough."""


class Turns:
    """Lets steps.py decide when this process makes steps, and how many, while the other library waits.

    For each block of steps it writes a file with their number, 0 to end the case; this process answers with a file of
    the seconds that they took.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.block, self.left, self.steps = folder, 0, 0, 0
        self.cpu = self.wall = 0.0

    def wait(self) -> None:
        go = self.folder / f"go-{self.block}"
        while not go.exists():
            time.sleep(0.003)
        self.steps = self.left = int(go.read_text())
        if not self.left:
            self.block += 1
            raise Measured
        self.cpu, self.wall = time.process_time(), time.perf_counter()

    def step(self) -> None:
        self.left -= 1
        if self.left == 0:
            self.answer(cpu=time.process_time() - self.cpu, wall=time.perf_counter() - self.wall)
            self.wait()

    def answer(self, **what: Any) -> None:
        target = self.folder / f"done-{self.block}-{RANK}"
        target.with_suffix(".tmp").write_text(json.dumps(what), encoding="utf-8")
        target.with_suffix(".tmp").rename(target)
        self.block += 1


TURNS = Turns(Path(os.environ["CASES_TURNS"])) if "CASES_TURNS" in os.environ else None


def endless() -> dict[str, Any]:
    """More arguments of a Trainer: while steps are measured, it goes on until that has ended."""
    return {"max_steps": 10**6} if TURNS else {}


def repeated(count: int) -> Iterable[int]:
    """``range(count)``, without an end while steps are measured."""
    return itertools.count() if TURNS else range(count)


class StepClock:
    """Measures CPU time between the ends of consecutive steps; call it after each step, and pause it elsewhere.

    While steps are measured in turns, it waits for the next turn instead; what lies between steps counts then.
    """

    def __init__(self) -> None:
        self.last: float | None = None

    def __call__(self) -> None:
        if TURNS:
            TURNS.step()
            return
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
    for _ in repeated(count):
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

    def chosen(self, patterns: str) -> dict[str, Case]:
        """Those that run on this number of processes and have a name that fits, in the order of the patterns."""
        return {
            name: case
            for pattern in patterns.split(",")
            for name, (case, worlds) in self.cases.items()
            if WORLD in worlds and fnmatch.fnmatch(name, pattern)
        }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True, help="where rank 0 writes the results")
    parser.add_argument("--plan", type=json.loads, required=True, help="names of cases by file, as JSON")
    parser.add_argument("--skip", type=json.loads, default=[], help="cases that an earlier process has run, as JSON")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    # The stack of a rank that hangs, and of those that the launcher ends with it. This includes imports and the end.
    faulthandler.register(signal.SIGTERM, chain=True)
    faulthandler.dump_traceback_later(CASE_SECONDS, exit=True)
    root = Path(os.environ["CASES_FOLDER"])
    results: dict[str, Any] = {"accelerate": importlib.util.find_spec("accelerate").origin}  # type: ignore[union-attr]
    done = set(arguments.skip)

    def write(running: str | None) -> None:
        if RANK == 0:
            text = json.dumps({"results": results, "running": running}, indent=1)
            arguments.out.with_suffix(".tmp").write_text(text, encoding="utf-8")
            arguments.out.with_suffix(".tmp").rename(arguments.out)

    for file, patterns in arguments.plan.items():
        # A library is imported when its cases come, so that the others do not depend on it.
        write(file)
        for name, case in importlib.import_module(Path(file).stem).cases.chosen(patterns).items():
            if name in results:
                raise ValueError(f"two cases are called {name}")
            if name in done:
                continue
            write(name)
            results[name] = {"file": file, **_run(case, root / name)}
            print(f"[{RANK}] {name}: {results[name].get('error') or 'done'} ({results[name]['seconds']} s)", flush=True)
    write(None)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    sys.stdout.flush()
    os._exit(0)  # what a library leaves running must not keep the process


def _run(case: Case, folder: Path) -> dict[str, Any]:
    from accelerate.state import AcceleratorState, GradientState

    before = dict(os.environ)
    if TURNS:
        faulthandler.cancel_dump_traceback_later()
        TURNS.wait()
    faulthandler.dump_traceback_later(CASE_SECONDS, exit=True)
    torch.manual_seed(0)
    numpy.random.seed(0)
    random.seed(0)
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
    except Measured:
        pass
    else:
        if TURNS:
            result["error"] = "the case ended before its steps were measured"
    if TURNS and "error" in result:
        TURNS.answer(error=result["error"])
    os.chdir(here)
    result["seconds"] = round(time.perf_counter() - start, 1)
    if len(STEP_SECONDS) >= ENOUGH_STEPS:
        result["step"] = statistics.quantiles(STEP_SECONDS, n=4)[0]
    faulthandler.dump_traceback_later(CASE_SECONDS, exit=True)
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    torch.use_deterministic_algorithms(False)
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


if __name__ == "__main__":
    from harness import main as main_of_cases  # this file as a module: the cases import it under that name

    main_of_cases()

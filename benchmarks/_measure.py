"""What the benchmarks share: timing in turns, verdicts, and the same measurement in the reference's interpreter.

On a machine that others use too, absolute times say little. Variants therefore take turns, round by round, and what is
reported is the median over rounds of the ratio (or difference) within a round: whatever slows a round down slows all
its variants down.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

REFERENCE_PYTHON = "ACCEL_BENCH_REFERENCE_PYTHON"
REFERENCE_MODULE = "accelerate"
_MARK = "FIGURES "

Times = dict[str, list[float]]


def in_turns(
    variants: Mapping[str, Callable[[], object]],
    rounds: int,
    warm_up: int = 2,
    clock: Callable[[], float] = time.process_time,
) -> Times:
    """Seconds of each variant in each round; each is the first of a round as often as the others.

    Args:
        variants: what to run, by name.
        rounds: how often to run each of them.
        warm_up: rounds before, whose times are not kept.
        clock: by default that of the processor time of this process, which other processes hardly disturb;
            ``time.perf_counter`` is for variants that wait for others.
    """
    times: Times = {name: [] for name in variants}
    names = list(variants)
    gc.collect()
    gc.disable()  # a collection of garbage would hit whichever variant happens to be running
    try:
        for turn in range(-warm_up, rounds):
            first = turn % len(names)
            for name in names[first:] + names[:first]:
                begin = clock()
                variants[name]()
                took = clock() - begin
                if turn >= 0:
                    times[name].append(took)
            gc.collect()
    finally:
        gc.enable()
    return times


def ratio(times: Times, name: str, base: str = "raw") -> float:
    """The median over rounds of what ``name`` takes, as a multiple of ``base``."""
    return statistics.median(one / other for one, other in zip(times[name], times[base], strict=True))


def extra(times: Times, name: str, base: str = "raw") -> float:
    """The median over rounds of the seconds that ``name`` takes more than ``base``."""
    return statistics.median(one - other for one, other in zip(times[name], times[base], strict=True))


def verdict(figure: float, target: float) -> str:
    """Whether a figure is at most its target."""
    return "met" if figure <= target else "missed"


def heading(title: str) -> None:
    """The title of a table."""
    print(f"\n{title}\n{'-' * len(title)}")


def row(label: str, figure: str, note: str = "") -> None:
    """One line of a table."""
    print(f"{label:<46} {figure:>14}  {note}".rstrip(), flush=True)


def report(figures: Any) -> None:
    """Hand figures from a worker to the process that started it."""
    print(_MARK + json.dumps(figures), flush=True)


def reference_python() -> str | None:
    """The interpreter that has the reference: that of the environment variable, or this one if it has it; else None."""
    named = os.environ.get(REFERENCE_PYTHON)
    if named:
        return named
    return sys.executable if importlib.util.find_spec(REFERENCE_MODULE) is not None else None


def libraries() -> dict[str, tuple[str, str]]:
    """What is measured: label -> (interpreter, module that has the Accelerator)."""
    found = {"accel": (sys.executable, "accel")}
    reference = reference_python()
    if reference is None:
        print(f"(without the reference: install it here, or name an interpreter that has it in {REFERENCE_PYTHON})")
    else:
        found["reference"] = (reference, REFERENCE_MODULE)
    return found


def environment() -> dict[str, str]:
    """The environment of a worker: one thread, and none of the settings that a launcher or a shell has left."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("ACCELERATE_", "TORCHELASTIC_"))}
    kept["OMP_NUM_THREADS"] = "1"
    # The reference then uses the CPU although there may be an accelerator, as accel does by the same variable.
    kept["ACCELERATE_USE_CPU"] = "true"
    return kept


@contextmanager
def _started(
    command: Sequence[str], environment: Mapping[str, str], timeout: float, **options: Any
) -> Iterator[subprocess.Popen[str]]:
    """A process that must succeed, and whose end is waited for.

    Raises:
        RuntimeError: it failed, or took more than ``timeout`` seconds and was ended.
    """
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, env=environment, stderr=errors, text=True, **options)
        # To wait with a timeout of subprocess is to look every 50 ms, which is a quarter of what some commands take.
        watch = threading.Timer(timeout, process.terminate)
        watch.start()
        try:
            yield process
        except BaseException:
            process.terminate()
            raise
        finally:
            code = process.wait()
            late = watch.finished.is_set()
            watch.cancel()
        if code != 0:
            errors.seek(0)
            ended = f"did not end in {timeout:g} s" if late else f"failed with exit code {code}"
            raise RuntimeError(f"{' '.join(command)} {ended}:\n{errors.read()[-3000:]}")


def run_command(
    command: Sequence[str], environment: Mapping[str, str], folder: str | Path | None = None, timeout: float = 120
) -> None:
    """Run a command without its output, and return when it has ended.

    Raises:
        RuntimeError: it failed, or took more than ``timeout`` seconds.
    """
    with _started(command, environment, timeout, stdout=subprocess.DEVNULL, cwd=folder):
        pass


def worker(python: str, script: str, *words: str, processes: int = 1, timeout: float = 300) -> Any:
    """Run a script in an interpreter, on one process or over torchrun, and return what it (its rank 0) reported last.

    Raises:
        RuntimeError: it failed, took too long, or reported nothing.
    """
    return list(reports(python, script, *words, processes=processes, timeout=timeout))[-1]


def reports(python: str, script: str, *words: str, processes: int = 1, timeout: float = 300) -> Iterator[Any]:
    """As :func:`worker`: everything that is reported, as it comes.

    Args:
        python: the interpreter.
        script: the script.
        *words: its arguments.
        processes: how many.
        timeout: seconds until it is ended.

    Raises:
        RuntimeError: it failed, took too long, or reported nothing.
    """
    launcher: Sequence[str] = ()
    if processes > 1:
        launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes))
    command = [python, *launcher, str(Path(script).resolve()), *words]
    found = 0
    with _started(command, environment(), timeout, stdout=subprocess.PIPE) as process:
        for line in process.stdout or ():
            if line.startswith(_MARK):
                found += 1
                yield json.loads(line[len(_MARK) :])
    if not found:
        raise RuntimeError(f"{' '.join(command)} reported nothing")

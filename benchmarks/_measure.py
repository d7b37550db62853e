"""Shared code of the benchmarks: interleaved timing, comparison with targets, and workers in other interpreters.

On a shared machine, absolute times are noisy. The variants are therefore interleaved in rounds, and the result is the
median over the rounds of the ratio (or difference) within a round, because a slow phase affects all variants alike.
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
    """Seconds of each variant in each round; the first variant of a round rotates.

    Args:
        variants: functions to time, by name.
        rounds: number of timed rounds.
        warm_up: number of rounds before that, which are not timed.
        clock: processor time by default, which other processes hardly affect; use ``time.perf_counter`` for variants
            that wait for other processes.
    """
    times: Times = {name: [] for name in variants}
    names = list(variants)
    gc.collect()
    gc.disable()  # a garbage collection would be attributed to the variant that is running
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
    """The median over the rounds of the time of ``name`` divided by that of ``base``."""
    return statistics.median(one / other for one, other in zip(times[name], times[base], strict=True))


def extra(times: Times, name: str, base: str = "raw") -> float:
    """The median over the rounds of the time of ``name`` minus that of ``base``, in seconds."""
    return statistics.median(one - other for one, other in zip(times[name], times[base], strict=True))


def verdict(figure: float, target: float) -> str:
    """Whether a figure is at most its target."""
    return "met" if figure <= target else "missed"


def drop_from_page_cache(folder: str | Path) -> None:
    """Drop the files of a directory from the page cache, except pages that a process has mapped."""
    for file in Path(folder).rglob("*"):
        if file.is_file():
            with open(file, "rb") as opened:
                os.fsync(opened.fileno())  # pages that are not written yet would stay
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def llama_config(gigabytes: float, layers: int, width: int) -> Any:
    """The configuration of a Llama of this size in float32, with heads of 128."""
    import transformers

    inner = int(gigabytes * 1e9 / 4 / layers / width / 3) // 64 * 64
    sizes: Any = {"vocab_size": 1000, "hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers}
    words: Any = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
    return transformers.LlamaConfig(**sizes, **words, num_attention_heads=width // 128, num_key_value_heads=2)


def heading(title: str) -> None:
    """The title of a table."""
    print(f"\n{title}\n{'-' * len(title)}", flush=True)


def row(label: str, figure: str, note: str = "") -> None:
    """One line of a table."""
    print(f"{label:<46} {figure:>14}  {note}".rstrip(), flush=True)


def report(figures: Any) -> None:
    """Send figures from a worker to the process that started it."""
    print(_MARK + json.dumps(figures), flush=True)


def reference_python() -> str | None:
    """The interpreter with the reference: from the environment variable, or this one if it is installed; else None."""
    named = os.environ.get(REFERENCE_PYTHON)
    if named:
        return named
    return sys.executable if importlib.util.find_spec(REFERENCE_MODULE) is not None else None


def libraries() -> dict[str, tuple[str, str]]:
    """The libraries to measure: label -> (interpreter, module with the Accelerator)."""
    found = {"accel": (sys.executable, "accel")}
    reference = reference_python()
    if reference is None:
        print(f"(without the reference: install it, or set {REFERENCE_PYTHON} to an interpreter that has it)")
    else:
        found["reference"] = (reference, REFERENCE_MODULE)
    return found


def environment() -> dict[str, str]:
    """The environment of a worker: one thread, and no settings of a launcher or a shell."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("ACCELERATE_", "TORCHELASTIC_"))}
    kept["OMP_NUM_THREADS"] = "1"
    # Both libraries read this variable.
    kept["ACCELERATE_USE_CPU"] = "true"
    return kept


@contextmanager
def _started(
    command: Sequence[str], environment: Mapping[str, str], timeout: float, **options: Any
) -> Iterator[subprocess.Popen[str]]:
    """Start a process, and wait for it at the end of the block.

    Raises:
        RuntimeError: it failed, or was terminated after ``timeout`` seconds.
    """
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, env=environment, stderr=errors, text=True, **options)
        # Popen.wait with a timeout polls every 50 ms, a quarter of the time of some commands.
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
            ended = f"timed out after {timeout:g} s" if late else f"failed with exit code {code}"
            raise RuntimeError(f"{' '.join(command)} {ended}:\n{errors.read()[-3000:]}")


def run_command(
    command: Sequence[str], environment: Mapping[str, str], folder: str | Path | None = None, timeout: float = 120
) -> None:
    """Run a command without its output.

    Raises:
        RuntimeError: it failed or timed out.
    """
    with _started(command, environment, timeout, stdout=subprocess.DEVNULL, cwd=folder):
        pass


def worker(python: str, script: str, *words: str, processes: int = 1, timeout: float = 300) -> Any:
    """Run a script with an interpreter, with torchrun for several processes, and return its last report.

    Raises:
        RuntimeError: it failed, timed out, or reported nothing.
    """
    return list(reports(python, script, *words, processes=processes, timeout=timeout))[-1]


def reports(python: str, script: str, *words: str, processes: int = 1, timeout: float = 300) -> Iterator[Any]:
    """Like :func:`worker`, but yield every report as it arrives.

    Args:
        python: the interpreter.
        script: the script.
        *words: its arguments.
        processes: number of processes.
        timeout: seconds until it is terminated.

    Raises:
        RuntimeError: it failed, timed out, or reported nothing.
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

"""The overhead of the launcher: import, help, one process, two processes, and the processor time of 64.

    python benchmarks/bench_launch.py [--runs 7] [--reference PYTHON] [--only many]

The figures are medians of interleaved runs; ratios are taken between neighbouring runs. PYTHON is an interpreter with
the reference, whose figures are then shown too.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import _measure

PACKAGES = [Path(__file__).parents[1] / "packages" / name / "src" for name in ("accel-state", "accel-launch")]
ACCEL = [sys.executable, "-m", "accel_launch"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
MANY = 64


def seconds(command: Sequence[str], environment: Mapping[str, str], folder: Path) -> float:
    """Wall-clock seconds of one run."""
    begin = time.perf_counter()
    _measure.run_command(command, environment, folder)
    return time.perf_counter() - begin


def processor_seconds(command: Sequence[str], environment: Mapping[str, str], folder: Path) -> float:
    """Processor time of one run, with all processes that it waits for."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    _measure.run_command(command, environment, folder)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def measure(
    commands: Mapping[str, Sequence[str]],
    runs: int,
    clock: Callable[[Sequence[str], Mapping[str, str], Path], float] = seconds,
) -> dict[str, list[float]]:
    """The seconds of each command in interleaved runs."""
    # Without bytecode, a launch would measure Python's compiler.
    hidden = ("ACCELERATE_", "TORCHELASTIC_", "PYTHONDONTWRITEBYTECODE")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(hidden)}
    environment["PYTHONPATH"] = os.pathsep.join([*map(str, PACKAGES), environment.get("PYTHONPATH", "")]).rstrip(
        os.pathsep
    )
    environment.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        environment["HF_HOME"] = name
        (folder / "noop.py").write_text("")
        for command in commands.values():
            clock(command, environment, folder)  # the first run also compiles to bytecode
        times = {label: [] for label in commands}
        for _ in range(runs):
            for label, command in commands.items():
                times[label].append(clock(command, environment, folder))
    return times


def ratio(times: Mapping[str, Sequence[float]], label: str, other: str) -> float:
    """The median ratio of two commands in the same round."""
    return statistics.median(mine / theirs for mine, theirs in zip(times[label], times[other], strict=True))


def commands_of(reference: str | None) -> dict[str, list[str]]:
    """The commands to time."""
    commands = {
        "python": [sys.executable, "-c", "pass"],
        "import accel_launch": [sys.executable, "-c", "import accel_launch"],
        "import torch": [sys.executable, "-c", "import torch"],
        "accel --help": [*ACCEL, "--help"],
        "accel launch --help": [*ACCEL, "launch", "--help"],
        "python noop.py": [sys.executable, "noop.py"],
        "accel launch, 1 process": [*ACCEL, "launch", "--cpu", "--num_processes", "1", "noop.py"],
        "torchrun, 2 processes": [*TORCHRUN, "2", "noop.py"],
        "accel launch, 2 processes": [*ACCEL, "launch", "--cpu", "--num_processes", "2", "noop.py"],
    }
    if reference:
        cli = [reference, "-m", "accelerate.commands.accelerate_cli"]
        commands["reference --help"] = [*cli, "--help"]
        commands["reference launch, 1 process"] = [*cli, "launch", "--cpu", "--num_processes", "1", "noop.py"]
        commands["reference launch, 2 processes"] = [*cli, "launch", "--cpu", "--num_processes", "2", "noop.py"]
    return commands


def rank_modules() -> int:
    """How many modules a rank has imported before its script, beyond those of Python itself."""
    script = "import sys; print(len(sys.modules))"
    counts = []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "count.py")
        file.write_text(script)
        for words in ([sys.executable], [*ACCEL, "launch", "--cpu", "--quiet", "--num_processes", "2"]):
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, PACKAGES))}
            out = subprocess.run([*words, str(file)], env=environment, stdout=subprocess.PIPE, text=True, check=True)
            counts.append(int(out.stdout.split()[0]))
    return counts[1] - counts[0]


def many(runs: int) -> None:
    """Print the processor time of a launch of many processes, against torchrun's."""
    commands = {
        f"torchrun, {MANY} processes": [*TORCHRUN, str(MANY), "noop.py"],
        f"accel launch, {MANY} processes": [*ACCEL, "launch", "--cpu", "--num_processes", str(MANY), "noop.py"],
    }
    times = measure(commands, runs, processor_seconds)
    for label, values in times.items():
        print(f"{label:<30} {statistics.median(values) * 1000:8.0f} ms of processor time")
    print(f"modules that a rank imports before its script: {rank_modules()}")
    found = ratio(times, *reversed(commands))
    print(f"accel launch of {MANY} processes takes {found:.2f} x torchrun's processor time (target: at most 1)")


def few(arguments: argparse.Namespace) -> None:
    """Print the table of wall-clock times and compare the figures with the targets."""
    times = measure(commands_of(arguments.reference), arguments.runs)
    took = {label: statistics.median(values) for label, values in times.items()}
    for label, value in took.items():
        print(f"{label:<30} {value * 1000:8.0f} ms")
    help_ratio = ratio(times, "accel --help", "import torch")
    added = took["accel launch, 1 process"] - took["python noop.py"]
    against_torchrun = ratio(times, "accel launch, 2 processes", "torchrun, 2 processes")
    print(f"\nimport accel_launch adds {(took['import accel_launch'] - took['python']) * 1000:.0f} ms to python")
    print(f"accel --help takes {help_ratio:.2f} x `import torch` (target: under 0.20)")
    print(f"accel launch of one process adds {added * 1000:.0f} ms to `python noop.py` (target: under 250)")
    print(f"accel launch of two processes takes {against_torchrun:.2f} x torchrun (target: at most 1, within noise)")
    if arguments.reference:
        print(f"accel --help takes {ratio(times, 'accel --help', 'reference --help'):.2f} x the reference's time")


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=7, help="timed runs of each command (default 7)")
    parser.add_argument("--reference", help="an interpreter with the reference installed")
    parser.add_argument("--only", choices=["many"], help="the part to run")
    arguments = parser.parse_args()
    if arguments.only is None:
        few(arguments)
    many(arguments.runs)


if __name__ == "__main__":
    main()

"""Import times: the Accelerator relative to torch alone, and commands that do not need torch.

python benchmarks/bench_import.py
"""

from __future__ import annotations

import argparse
import compileall
import importlib.util
import resource
import time
from collections.abc import Callable, Sequence

import _measure

IMPORT_TARGET = 1.10
HELP_TARGET = 0.20
# Wall-clock seconds of interactive commands, and their arguments.
COMMAND_TARGET = 0.25
COMMANDS = {
    "--help": ["--help"],
    "launch --help": ["launch", "--help"],
    "config show": ["config", "show"],
    "env --help": ["env", "--help"],
}


def child_seconds() -> float:
    """Processor time of all child processes so far; other processes hardly affect it."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def runner(command: Sequence[str]) -> Callable[[], object]:
    environment = _measure.environment()
    return lambda: _measure.run_command(command, environment)


def commands(python: str, module: str, cli: str) -> dict[str, Callable[[], object]]:
    """The commands to time for one library, in its interpreter."""
    return {
        "raw": runner([python, "-c", "import torch"]),
        "import": runner([python, "-c", f"from {module} import Accelerator"]),
        "help": runner([python, "-m", cli, "--help"]),
    }


def compile_ours() -> None:
    """Compile the packages to bytecode, as pip does; an editable install compiles them at the first import."""
    for package in ("accel", "accel_bigmodel", "accel_data", "accel_fp8", "accel_launch", "accel_state", "accel_track"):
        spec = importlib.util.find_spec(package)
        for folder in (spec and spec.submodule_search_locations) or ():
            compileall.compile_dir(folder, quiet=1)


def main() -> None:
    """Print the tables and compare the figures with the targets."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7, help="timed runs of each command (default 7)")
    rounds = parser.parse_args().rounds
    compile_ours()
    _measure.heading("Imports (processor time)")
    for label, (python, module) in _measure.libraries().items():
        cli = "accel_launch" if label == "accel" else f"{module}.commands.accelerate_cli"
        times = _measure.in_turns(commands(python, module, cli), rounds, warm_up=1, clock=child_seconds)
        imported, helped = _measure.ratio(times, "import"), _measure.ratio(times, "help")
        ours = label == "accel"
        if ours:
            _measure.row("import torch", f"{sorted(times['raw'])[rounds // 2] * 1e3:.0f} ms")
        note = f"target: at most {IMPORT_TARGET:.2f}: {_measure.verdict(imported, IMPORT_TARGET)}" if ours else ""
        _measure.row(f"{label}: import Accelerator, relative to torch", f"{imported:.3f} x", note)
        note = f"target: at most {HELP_TARGET:.2f}: {_measure.verdict(helped, HELP_TARGET)}" if ours else ""
        _measure.row(f"{label}: --help, relative to import torch", f"{helped:.3f} x", note)
    waiting(rounds)


def waiting(rounds: int) -> None:
    """Wall-clock time of interactive commands."""
    _measure.heading("Commands that do not import torch (wall-clock time)")
    for label, (python, module) in _measure.libraries().items():
        ours = label == "accel"
        cli = "accel_launch" if ours else f"{module}.commands.accelerate_cli"
        words = {name: text for name, text in COMMANDS.items() if ours or "show" not in name}
        times = _measure.in_turns(
            {name: runner([python, "-m", cli, *text]) for name, text in words.items()},
            rounds,
            warm_up=1,
            clock=time.perf_counter,
        )
        for name, taken in times.items():
            median = sorted(taken)[rounds // 2]
            note = f"target: at most {COMMAND_TARGET:.2f} s: {_measure.verdict(median, COMMAND_TARGET)}" if ours else ""
            _measure.row(f"{label}: {name}", f"{median:.3f} s", note)


if __name__ == "__main__":
    main()

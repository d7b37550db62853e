"""Runs a program that starts the ranks (mpirun, srun, deepspeed), and reports last which rank failed first.

These programs mix the output of all ranks. A rank that fails writes one marked line to stderr; the lines of all
machines are removed from the output here, and the earliest failure is described after everything has ended. Torch-free.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any

from accel_state.errors import ConfigurationError

from .elastic.report import RankFailure, announce, first_failure, shell_exit_code, without_shutdown_crashes
from .elastic.worker import FAILURE_MARK, RELAY_VARIABLE, die_with_launcher
from .supervisor import Child, Interrupted, SignalWatch, Supervised

Terminator = Callable[["subprocess.Popen[bytes]", Mapping[str, str]], None]
"""Ends a run after a signal, given the program and its variables; by default the program gets a SIGTERM."""


def run_external(command: Sequence[str], environment: Mapping[str, str], end: Terminator | None = None) -> int:
    """Run a program that starts ranks, wait for it, and describe the first failure.

    Returns:
        The exit code: that of the rank that failed first; 128 + N after signal N to this process; else the program's
        own.
    """
    environment, launcher = {**environment, RELAY_VARIABLE: "1"}, os.getpid()
    options: dict[str, Any] = {"stderr": subprocess.PIPE}
    if sys.platform != "win32":
        options["preexec_fn"] = lambda: die_with_launcher(launcher)
    try:
        program = Child.start(command, environment, **options)
    except OSError as error:
        raise ConfigurationError(f"{command[0]} cannot be started: {error.strerror}.") from None
    process = program.process
    assert isinstance(process, subprocess.Popen) and process.stderr is not None
    reports: list[tuple[RankFailure, int]] = []
    with SignalWatch() as watch:
        watch.supervised = Supervised(program)
        try:
            with watch.interruptible():
                _copy(process.stderr, reports)
                code = process.wait()
        except Interrupted:
            # The programs treat an interrupt differently (srun only prints its state); all end their ranks on SIGTERM.
            if end is None:
                process.send_signal(signal.SIGTERM)
            else:
                end(process, environment)
            _copy(process.stderr, reports)
            process.wait()
        if watch.received:
            return 128 + watch.received
    # If the program succeeded, a report comes from something that a rank started and whose failure it handled.
    if code and reports:
        first = first_failure(without_shutdown_crashes(failure for failure, _ in reports))
        announce(first, next(world_size for failure, world_size in reports if failure is first))
        return first.exit_code
    return shell_exit_code(code)


def _copy(stream: IO[bytes], reports: list[tuple[RankFailure, int]]) -> None:
    """Copy stderr until it ends, except for reports of failed ranks, which are collected with the world size."""
    for line in stream:
        before, mark, report = line.partition(FAILURE_MARK.encode())
        if mark:
            with contextlib.suppress(ValueError, TypeError, KeyError):
                fields = json.loads(report)
                world_size = int(fields.pop("world_size"))
                reports.append((RankFailure(**{"local_rank": 0, **fields}), world_size))
                continue
        sys.stderr.buffer.write(before + mark + report)
        sys.stderr.flush()

"""Runs a program that starts the ranks (mpirun, srun, deepspeed), and reports last which rank failed first.

These programs mix the output of all ranks. A rank that fails writes one marked line to stderr; the lines of all
machines are removed from the output here, and the earliest failure is described after everything has ended. Torch-free.
"""

from __future__ import annotations

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
    return _ExternalLauncher(command, {**environment, RELAY_VARIABLE: "1"}, end).wait()


class _ExternalLauncher:
    """The running program."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], end: Terminator | None) -> None:
        self._environment, self._terminator = environment, end
        self._reports: list[tuple[RankFailure, int]] = []
        launcher = os.getpid()
        options: dict[str, Any] = {"stderr": subprocess.PIPE}
        if sys.platform != "win32":
            options["preexec_fn"] = lambda: die_with_launcher(launcher)
        try:
            self._program = Child.start(command, environment, **options)
        except OSError as error:
            raise ConfigurationError(f"{command[0]} cannot be started: {error.strerror}.") from None

    def wait(self) -> int:
        """Copy stderr until it ends, and return the exit code."""
        process = self._program.process
        assert isinstance(process, subprocess.Popen) and process.stderr is not None
        with SignalWatch() as watch:
            watch.supervised = Supervised(self._program)
            try:
                with watch.interruptible():
                    self._copy(process.stderr)
                    code = process.wait()
            except Interrupted:
                self._end(process)
                self._copy(process.stderr)
                process.wait()
            if watch.received:
                return 128 + watch.received
        # If the program succeeded, a report comes from something that a rank started and whose failure it handled.
        if code and self._reports:
            first = first_failure(without_shutdown_crashes(failure for failure, _ in self._reports))
            announce(first, next(world_size for failure, world_size in self._reports if failure is first))
            return first.exit_code
        return shell_exit_code(code)

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        # The programs treat an interrupt differently (srun only prints its state); all end their ranks on SIGTERM.
        if self._terminator is None:
            process.send_signal(signal.SIGTERM)
        else:
            self._terminator(process, self._environment)

    def _copy(self, stream: IO[bytes]) -> None:
        for line in stream:
            before, mark, report = line.partition(FAILURE_MARK.encode())
            if mark and self._add_report(report):
                continue
            sys.stderr.buffer.write(before + mark + report)
            sys.stderr.flush()

    def _add_report(self, report: bytes) -> bool:
        try:
            fields = json.loads(report)
            world_size = int(fields.pop("world_size"))
            self._reports.append((RankFailure(**{"local_rank": 0, **fields}), world_size))
        except (ValueError, TypeError, KeyError):
            return False
        return True

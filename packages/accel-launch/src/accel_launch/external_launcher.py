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
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import IO

from accel_state.errors import ConfigurationError

from .elastic.preemption import FORWARDED
from .elastic.report import RankFailure, announce, first_failure, shell_exit_code, without_shutdown_crashes
from .elastic.worker import FAILURE_MARK, RELAY_VARIABLE, die_with_launcher

_GRACE_SECONDS = 35.0
_SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT") if hasattr(signal, name))


Terminator = Callable[["subprocess.Popen[bytes]", Mapping[str, str]], None]
"""Ends a run after a signal, given the program and its variables; by default the program gets a SIGTERM."""


def run_external(command: Sequence[str], environment: Mapping[str, str], end: Terminator | None = None) -> int:
    """Run a program that starts ranks, wait for it, and describe the first failure.

    Returns:
        The exit code: that of the rank that failed first; 128 + N after signal N to this process; else the program's
        own.
    """
    with _ExternalLauncher(command, {**environment, RELAY_VARIABLE: "1"}, end) as launcher:
        return launcher.wait()


class _ExternalLauncher:
    """The running program; a context in which signals to this process are forwarded to it."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], end: Terminator | None) -> None:
        self._environment, self._terminator = environment, end
        self._reports: list[tuple[RankFailure, int]] = []
        self._received: int | None = None
        launcher = os.getpid()
        try:
            # In a session of its own: Ctrl-C reaches it from here, and not from the terminal a second time.
            self._process = subprocess.Popen(
                command,
                env=dict(environment),
                stderr=subprocess.PIPE,
                start_new_session=sys.platform != "win32",
                preexec_fn=None if sys.platform == "win32" else lambda: die_with_launcher(launcher),
            )
        except OSError as error:
            raise ConfigurationError(f"{command[0]} cannot be started: {error.strerror}.") from None

    def __enter__(self) -> _ExternalLauncher:
        self._former = {number: signal.getsignal(number) for number in (*_SIGNALS, *FORWARDED)}
        for number, handler in self._former.items():
            if handler is not signal.SIG_IGN:
                signal.signal(number, self._forward if number in FORWARDED else self._end)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)

    def wait(self) -> int:
        """Copy stderr until it ends, and return the exit code."""
        assert self._process.stderr is not None
        self._copy(self._process.stderr)
        code = self._process.wait()
        if self._received is not None:
            return 128 + self._received
        # If the program succeeded, a report comes from something that a rank started and whose failure it handled.
        if code and self._reports:
            first = first_failure(without_shutdown_crashes(failure for failure, _ in self._reports))
            announce(first, next(world_size for failure, world_size in self._reports if failure is first))
            return first.exit_code
        return shell_exit_code(code)

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

    def _forward(self, number: int, frame: object) -> None:
        self._process.send_signal(number)

    def _end(self, number: int, frame: object) -> None:
        if self._received is not None:
            self._kill()
            return
        self._received = number
        # The programs treat an interrupt differently (srun only prints its state); all end their ranks on SIGTERM.
        if self._terminator is None:
            self._process.send_signal(signal.SIGTERM)
        else:
            self._terminator(self._process, self._environment)
        timer = threading.Timer(_GRACE_SECONDS, self._kill)
        timer.daemon = True
        timer.start()

    def _kill(self) -> None:
        import psutil

        with contextlib.suppress(psutil.NoSuchProcess):
            program = psutil.Process(self._process.pid)
            for process in [*program.children(recursive=True), program]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()

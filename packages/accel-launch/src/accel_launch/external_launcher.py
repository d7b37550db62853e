"""Runs the program that starts the ranks (mpirun, srun, deepspeed) and shows, last, which rank failed first.

Such programs mix the output of all ranks. A rank that fails says so in one marked line on stderr, which comes through
here from every machine; the lines are taken out, and the earliest failure is described when everything has ended.
Imports no torch.
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
from dataclasses import asdict
from typing import IO

from accel_state.env import parse_flag_from_env
from accel_state.errors import ConfigurationError

from .elastic.report import RankFailure, describe, first_failure, shell_exit_code, without_crashes_at_the_end
from .elastic.worker import FAILURE_MARK, RELAY_VARIABLE, die_with_launcher, write_line

_GRACE_SECONDS = 35.0
# Asks ranks to save, and to go on: all of the programs pass these on to them.
_MESSAGES = tuple(getattr(signal, name) for name in ("SIGUSR1", "SIGUSR2") if hasattr(signal, name))
_SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT") if hasattr(signal, name))


def announce(failure: RankFailure, world_size: int) -> None:
    """Print what failed to stderr: in words, or for the launcher that started this one."""
    sys.stdout.flush()
    if parse_flag_from_env(RELAY_VARIABLE):
        report = {key: value for key, value in asdict(failure).items() if key != "host" or value}
        write_line({**report, "world_size": world_size})
    else:
        print(describe(failure, world_size), file=sys.stderr, flush=True)


End = Callable[["subprocess.Popen[bytes]", Mapping[str, str]], bool]
"""Ends a run after a signal, given the program and its variables; False leaves it to the program, which gets a SIGTERM.
"""


def run_relayed(command: Sequence[str], environment: Mapping[str, str], end: End | None = None) -> int:
    """Run a program that starts ranks, wait for it, and describe the first failure.

    Args:
        command: its words.
        environment: all its variables.
        end: for a program that does not end its ranks by itself.

    Returns:
        The exit code: that of the rank that failed first; 128 + N after a signal N to this process; else the program's
        own.

    Raises:
        ConfigurationError: the program cannot be started.
    """
    relay = _Relay(command, {**environment, RELAY_VARIABLE: "1"}, end)
    with relay:
        return relay.wait()


class _Relay:
    """The running program; a context in which signals to this process go on to it."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], end: End | None) -> None:
        self._environment, self._end_run = environment, end
        self._reports: list[tuple[RankFailure, int]] = []
        self._received: int | None = None
        launcher = os.getpid()
        try:
            # In a group of its own: Ctrl-C reaches it once, from here, and not a second time from the terminal.
            self._process = subprocess.Popen(
                command,
                env=dict(environment),
                stderr=subprocess.PIPE,
                start_new_session=sys.platform != "win32",
                preexec_fn=None if sys.platform == "win32" else lambda: die_with_launcher(launcher),
            )
        except OSError as error:
            raise ConfigurationError(f"{command[0]} cannot be started: {error.strerror}.") from None

    def __enter__(self) -> _Relay:
        self._former = {number: signal.getsignal(number) for number in (*_SIGNALS, *_MESSAGES)}
        for number, handler in self._former.items():
            if handler is not signal.SIG_IGN:
                signal.signal(number, self._pass_message if number in _MESSAGES else self._forward)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)

    def wait(self) -> int:
        """Pass stderr on until it ends."""
        assert self._process.stderr is not None
        self._pass_on(self._process.stderr)
        code = self._process.wait()
        if self._received is not None:
            return 128 + self._received
        # A report without a failure of the whole: something that a rank started, and coped with.
        if code and self._reports:
            first = first_failure(without_crashes_at_the_end(failure for failure, _ in self._reports))
            announce(first, next(world for failure, world in self._reports if failure is first))
            return first.exit_code
        return shell_exit_code(code)

    def _pass_on(self, stream: IO[bytes]) -> None:
        for line in stream:
            before, mark, report = line.partition(FAILURE_MARK.encode())
            if mark and self._take(report):
                continue
            sys.stderr.buffer.write(before + mark + report)
            sys.stderr.flush()

    def _take(self, report: bytes) -> bool:
        try:
            fields = json.loads(report)
            world_size = int(fields.pop("world_size"))
            self._reports.append((RankFailure(**{"local_rank": 0, **fields}), world_size))
        except (ValueError, TypeError, KeyError):
            return False
        return True

    def _pass_message(self, number: int, frame: object) -> None:
        self._process.send_signal(number)

    def _forward(self, number: int, frame: object) -> None:
        if self._received is not None:
            self._end()
            return
        self._received = number
        # What the programs make of an interrupt differs (srun only shows its state); all of them end their ranks on
        # SIGTERM.
        if self._end_run is None or not self._end_run(self._process, self._environment):
            self._process.send_signal(signal.SIGTERM)
        timer = threading.Timer(_GRACE_SECONDS, self._end)
        timer.daemon = True
        timer.start()

    def _end(self) -> None:
        import psutil

        with contextlib.suppress(psutil.NoSuchProcess):
            program = psutil.Process(self._process.pid)
            for process in [*program.children(recursive=True), program]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()

"""``accel`` in a process forked from one that has imported torch, which takes a new interpreter two seconds.

For tests of what the launcher does. Its ranks are new interpreters, as ever.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any

from accel_state.testing import run_world


class ForkedLauncher:
    """A running ``accel WORDS``, or Python code instead, with what tests need of the interface of Popen."""

    def __init__(self, words: Sequence[str], folder: Path, env: Mapping[str, str], code: str = "") -> None:
        _start_server()
        context: Any = multiprocessing.get_context("forkserver")
        self.args = list(words)
        (out, out_there), (err, err_there) = (context.Pipe(duplex=False) for _ in range(2))
        self._process = context.Process(
            target=_main, args=(self.args, code, str(folder), dict(env), out_there, err_there), daemon=False
        )
        try:
            self._process.start()
        finally:
            out_there.close()
            err_there.close()
        self.pid: int = self._process.pid
        self.stdout, self.stderr = _file(out), _file(err)
        self._texts: list[str] = []

    @property
    def returncode(self) -> int | None:
        """The exit code as poll() has found it."""
        return self.poll()

    def poll(self) -> int | None:
        """The exit code, -N after signal N; None while it runs."""
        code: int | None = self._process.exitcode
        return code

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the exit code."""
        self._process.join(timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return code

    def communicate(self, timeout: float = 600) -> tuple[str, str]:
        """Read its output to the end, and wait."""
        deadline = time.monotonic() + timeout
        if not self._texts:
            texts = ["", ""]

            def read(index: int, file: IO[str]) -> None:
                with file:
                    texts[index] = file.read()

            readers = [
                threading.Thread(target=read, args=(index, file), daemon=True)
                for index, file in enumerate((self.stdout, self.stderr))
            ]
            for reader in readers:
                reader.start()
            for reader in readers:
                reader.join(max(0.0, deadline - time.monotonic()))
                if reader.is_alive():
                    raise subprocess.TimeoutExpired(self.args, timeout)
            self._texts = texts
        self.wait(max(0.0, deadline - time.monotonic()))
        return self._texts[0], self._texts[1]

    def send_signal(self, number: int) -> None:
        """Send a signal if it still runs."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self._process.terminate()

    def kill(self) -> None:
        """Send SIGKILL."""
        self._process.kill()


def _file(connection: Connection) -> IO[str]:
    file = os.fdopen(os.dup(connection.fileno()), encoding="utf-8")
    connection.close()
    return file


@functools.cache
def _start_server() -> None:
    """Start the server of run_world, with everything that conftest.py files preload."""
    run_world(_nothing, 1, state=False)


def _nothing() -> None:
    pass


def _main(
    words: list[str], code: str, folder: str, env: dict[str, str], stdout: Connection, stderr: Connection
) -> None:
    """What ``python -m accel_launch`` or ``python -c`` does, in the forked process."""
    for connection, number in ((stdout, 1), (stderr, 2)):
        os.dup2(connection.fileno(), number)
        os.set_inheritable(number, True)
        connection.close()
    # As they are for a new interpreter: the server's may belong to a terminal.
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(env)
    sys.argv = ["accel", *words]
    if code:
        exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
    else:
        from accel_launch.cli import main

        sys.exit(main())

"""Forks processes from a server that has imported their libraries: a new interpreter takes two seconds to import torch.

Two modes:

- Programs, as ``python -c`` runs them: :class:`Processes` forks them from a server that imports only the modules it is
  given. A program ends as an interpreter does: it joins its threads and runs its exit handlers.
- Functions and example scripts, in ranks or alone: :func:`run_launched`, :func:`run_alone` and :func:`call_alone` call
  ``run_world``, whose server imports what the ``conftest.py`` files preload.

The servers differ because trackers set variables, patch other libraries and keep threads: a program must find torch
and none of what else tests import, pytest included. A rank of ``run_world`` has all of it, skips the interpreter's
shutdown, which races with gloo, and returns values instead of text.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import io
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from concurrent import futures
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

# Variables that a launcher or a shell has set must not affect a script.
_HIDDEN = ("ACCELERATE_", "TORCHELASTIC_", "FSDP_")
# Variables that run_world sets for a rank.
_OF_A_RANK = ("RANK", "LOCAL_RANK", "GROUP_RANK", "GROUP_WORLD_SIZE", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
_OF_A_RANK += ("MASTER_ADDR", "MASTER_PORT", "ACCELERATE_USE_CPU")
# As in the workspace's conftest.py, which multiplies the limits of programs that Popen starts.
_PATIENCE = float(os.environ.get("ACCEL_TEST_PATIENCE", "1"))
ACCEL = "import sys; from accel_launch.cli import main; sys.exit(main())"  # the program ``accel``


class Processes:
    """Programs forked from one server, which starts with the first of them; a context manager that ends the server.

    Args:
        *modules: modules that the server imports.
    """

    def __init__(self, *modules: str) -> None:
        self._modules = modules
        self._end = contextlib.ExitStack()

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        self._end.close()

    @functools.cached_property
    def _server(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        # Programs must buffer their output as new interpreters do, whatever this process does.
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": ""}
        with theirs as there:
            command = [sys.executable, __file__, str(there.fileno()), *self._modules]
            # The streams that the programs inherit: no input, and output to pipes.
            server = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, env=environment, pass_fds=[there.fileno()]
            )
        self._end.enter_context(server)
        return self._end.enter_context(ours)  # closed first, which ends the server

    def start(self, code: str, *words: str, cwd: Path, env: Mapping[str, str]) -> Program:
        """Start code with words as arguments."""
        return Program(self._server, {"code": code, "words": words, "cwd": str(cwd), "env": dict(env)})

    def run(
        self, code: str, *words: str, cwd: Path, env: Mapping[str, str], timeout: float
    ) -> subprocess.CompletedProcess[str]:
        """Run code with words as arguments; after ``timeout`` seconds it is killed, and ``TimeoutExpired`` raised."""
        program = self.start(code, *words, cwd=cwd, env=env)
        try:
            out, err = program.communicate(timeout)
        finally:
            program.kill()
            status = program.wait()
        return subprocess.CompletedProcess(program.args, status, out, err)


class Program:
    """A running program, with what tests need of the interface of ``Popen``. Its input is empty."""

    def __init__(self, server: socket.socket, job: dict[str, Any]) -> None:
        self.args = ["python", "-c", job["code"], *job["words"]]
        self.returncode: int | None = None
        self._texts: list[futures.Future[str]] = []
        self._status, theirs = Pipe()
        (out, out_there), (err, err_there) = os.pipe(), os.pipe()
        self.stdout, self.stderr = open(out, encoding="utf-8"), open(err, encoding="utf-8")  # noqa: SIM115
        with theirs:
            socket.send_fds(server, [b"."], [theirs.fileno(), out_there, err_there])
        for written in (out_there, err_there):
            os.close(written)
        self._status.send(job)
        self.pid: int = self._status.recv()

    def poll(self) -> int | None:
        """Return the exit code, -N after signal N; None while the program runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the exit code."""
        if self.returncode is None:
            if not self._status.poll(_longer(timeout)):
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            self.returncode = int(self._status.recv())
        return self.returncode

    def communicate(self, timeout: float = 600) -> tuple[str, str]:
        """Read the output to its end, and wait."""
        timeout = _longer(timeout) or 0
        deadline = time.monotonic() + timeout
        if not self._texts:
            pool = futures.ThreadPoolExecutor(2)
            self._texts = [pool.submit(_read, file) for file in (self.stdout, self.stderr)]
            pool.shutdown(wait=False)
        if futures.wait(self._texts, timeout).not_done:
            raise subprocess.TimeoutExpired(self.args, timeout)
        self.wait(max(0.0, deadline - time.monotonic()))
        return self._texts[0].result(), self._texts[1].result()

    def send_signal(self, number: int) -> None:
        """Send a signal if the program still runs."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


def _longer(seconds: float | None) -> float | None:
    """Multiply a limit of time; shorter ones are those of tests in which a process hangs."""
    return seconds * _PATIENCE if seconds and seconds >= 30 else seconds


def _read(file: io.TextIOBase) -> str:
    with file:
        return file.read()


def _serve(control: socket.socket) -> dict[str, Any] | None:
    """Fork for each job, and return it in the new process; None in the server when its client has closed."""
    # Ctrl-C is for the client, which ends the server; and nobody waits for the processes that wait for programs.
    handlers = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGCHLD)}
    while received := socket.recv_fds(control, 1, 3)[1]:
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, handlers[signal.SIGCHLD])
            client, *outputs = Connection(received[0]), *received[1:]
            job: dict[str, Any] = client.recv()
            program = os.fork()
            if program:
                for output in outputs:
                    os.close(output)
                with contextlib.suppress(BrokenPipeError):  # the client has ended
                    client.send(program)
                    client.send(os.waitstatus_to_exitcode(os.waitpid(program, 0)[1]))
                os._exit(0)
            signal.signal(signal.SIGINT, handlers[signal.SIGINT])
            client.close()
            for number, opened in enumerate(outputs, 1):
                os.dup2(opened, number)
                os.close(opened)
            return job
        for descriptor in received:
            os.close(descriptor)
    return None


def _become(job: dict[str, Any]) -> None:
    """Make this process one that was started for the job, and run its code."""
    os.environ.clear()
    os.environ.update(job["env"])
    os.chdir(job["cwd"])
    sys.argv, sys.path[0] = ["-c", *job["words"]], ""
    main = sys.modules["__main__"] = ModuleType("__main__")
    exec(compile(job["code"], "<string>", "exec"), main.__dict__)


def run_launched(
    script: Path, *words: object, launch: tuple[object, ...] = ("--cpu",), folder: Path, seconds: float = 300
) -> list[str]:
    """Return the lines that a script prints under ``accel launch``, rank by rank.

    A start costs a tenth of the launcher's, which begins a new interpreter for itself and for each rank. For tests of
    what a script computes; the launcher has tests of its own, and starts some of the examples too.

    Args:
        script: the file.
        *words: its arguments.
        launch: options of ``accel launch``; the processes must all be on this machine.
        folder: working directory of the launcher and the processes.
        seconds: limit of the run.
    """
    from accel_state.testing import run_world

    arguments = tuple(map(str, words))
    start = _planned(["launch", "--dry_run", "--json", "-q", *map(str, launch), str(script), *arguments], folder)
    assert start["command"][-1 - len(arguments) :] == [str(script), *arguments], start["command"]
    hidden = {name: None for name in os.environ if name.startswith(_HIDDEN)}
    # run_world sets each rank's variables, as the launcher's plan does.
    texts = run_world(
        _run_script,
        len(start["ranks"]),
        *(str(script), arguments, str(folder)),
        env={**hidden, **start["environment"]},
        state=False,
        timeout=seconds,
    )
    return [line for text in texts for line in text.splitlines()]


def run_alone(script: Path, *words: object, folder: Path, seconds: float = 300, **variables: str) -> str:
    """Return what ``python script`` prints, without a launcher."""
    arguments = tuple(map(str, words))
    printed: str = call_alone(_run_script, str(script), arguments, str(folder), seconds=seconds, **variables)
    return printed


def call_alone(function: Callable[..., Any], *arguments: Any, seconds: float = 300, **variables: str) -> Any:
    """Return what a function of a module returns in a process that is no rank; if it raises, raise ``WorldError``."""
    from accel_state.testing import run_world

    hidden = dict.fromkeys((*_OF_A_RANK, *(name for name in os.environ if name.startswith(_HIDDEN))))
    (result,) = run_world(function, 1, *arguments, env={**hidden, **variables}, state=False, timeout=seconds)
    return result


def _planned(words: list[str], folder: Path) -> dict[str, Any]:
    """Return what the launcher would start on this machine."""
    from accel_launch.cli import main

    printed, here = io.StringIO(), Path.cwd()
    os.chdir(folder)  # configuration files may name others by relative paths
    try:
        with contextlib.redirect_stdout(printed):
            code = main(words)
    finally:
        os.chdir(here)
    assert code == 0, printed.getvalue()
    (start,) = json.loads(printed.getvalue())
    return start


def _run_script(script: str, arguments: tuple[str, ...], folder: str) -> str:
    """Run a file as ``python file`` does, in this process, and return what it prints."""
    os.chdir(folder)
    sys.argv = [script, *arguments]
    sys.path.insert(0, os.path.dirname(script))
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(script, run_name="__main__")
    return printed.getvalue()


if __name__ == "__main__":
    for name in sys.argv[2:]:
        importlib.import_module(name)
    gc.freeze()  # garbage collections of programs skip what is imported here
    with socket.socket(fileno=int(sys.argv[1])) as control:
        given = _serve(control)
    if given is not None:
        _become(given)

"""A command line to run, and scripts to run it on."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest
from forks import ACCEL, Processes, Program

import accel_launch
import accel_state
from accel_launch.cli import main
from accel_state.ports import listen, reserved_port

# A generous limit: a busy machine can be ten times slower.
TIMEOUT_SECONDS = 110


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give every test the time of three commands, each of which has its own limit."""
    for item in items:
        if Path(__file__).parent in item.path.parents and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(3 * TIMEOUT_SECONDS))


@dataclass
class Shell:
    """Runs ``accel`` in a temporary directory, in an environment without settings of this machine."""

    folder: Path
    env: dict[str, str]
    processes: Processes

    def write(self, name: str, text: str) -> Path:
        """Write a file, dedented."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
        return path

    def start(self, *words: str | Path, **env: str) -> subprocess.Popen[str]:
        """Start ``accel WORDS`` without waiting for it."""
        return subprocess.Popen(
            [sys.executable, "-m", "accel_launch", *map(str, words)],
            cwd=self.folder,
            env={**self.env, **env},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def fork(self, *words: str | Path, **env: str) -> Program:
        """Start ``accel WORDS`` where torch is imported already: for launchers of several processes."""
        return self.processes.start(ACCEL, *map(str, words), cwd=self.folder, env={**self.env, **env})

    def accel(
        self, *words: str | Path, timeout: float = TIMEOUT_SECONDS, **env: str
    ) -> subprocess.CompletedProcess[str]:
        """Run ``accel WORDS``."""
        return subprocess.run(
            [sys.executable, "-m", "accel_launch", *map(str, words)],
            cwd=self.folder,
            env={**self.env, **env},
            text=True,
            capture_output=True,
            timeout=timeout,
            check=False,
        )

    def launch(self, *words: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
        """Run ``accel launch --cpu WORDS`` as :meth:`fork` starts it."""
        words = ("launch", "--cpu", *map(str, words))
        return self.processes.run(ACCEL, *words, cwd=self.folder, env={**self.env, **env}, timeout=TIMEOUT_SECONDS)

    def call(self, *words: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
        """Run ``accel WORDS`` in this process, for commands that start no other: half a second faster."""
        out, err, directory = io.StringIO(), io.StringIO(), os.getcwd()
        with (
            mock.patch.dict(os.environ, {**self.env, **env}, clear=True),
            mock.patch.object(os, "execvpe", side_effect=AssertionError("this process must not become a script")),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            os.chdir(self.folder)
            try:
                code = main(list(map(str, words)))
            except SystemExit as leaving:
                code = int(leaving.code or 0)
            finally:
                os.chdir(directory)
        return subprocess.CompletedProcess(words, code, out.getvalue(), err.getvalue())

    def python(self, code: str) -> subprocess.CompletedProcess[str]:
        """Run Python code."""
        return subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code)],
            cwd=self.folder,
            env=self.env,
            text=True,
            capture_output=True,
            timeout=TIMEOUT_SECONDS,
            check=False,
        )

    def forked_python(self, code: str) -> subprocess.CompletedProcess[str]:
        """Run Python code where torch is imported already."""
        return self.processes.run(textwrap.dedent(code), cwd=self.folder, env=self.env, timeout=TIMEOUT_SECONDS)


@pytest.fixture(scope="session")
def processes() -> Iterator[Processes]:
    """Launchers of several processes, forked from a server that imports once what such a launch imports."""
    modules = ("accel_launch.commands.launch", "accel_launch.launchers.elastic", "accel_launch.elastic.run", "psutil")
    with Processes("torch", *modules) as server:
        yield server


@pytest.fixture
def shell(tmp_path: Path, processes: Processes) -> Shell:
    """A shell in a fresh directory."""
    hidden = (
        "ACCELERATE_",
        "OMP_NUM_THREADS",
        "RANK",
        "WORLD_SIZE",
        "LOCAL_",
        "MASTER_",
        "TORCHELASTIC_",
        "LOGLEVEL",
        "PYTEST_",
        "PYTHONUNBUFFERED",
    )
    env = {key: value for key, value in os.environ.items() if not key.startswith(hidden)}
    path = os.pathsep.join(str(Path(str(package.__file__)).parents[1]) for package in (accel_launch, accel_state))
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    work = tmp_path / "work"
    work.mkdir()
    env |= {"PYTHONPATH": path, "HF_HOME": str(tmp_path / "hf"), "TMPDIR": str(temporary)}
    return Shell(work, env, processes)


@pytest.fixture
def started() -> Iterator[Callable[[Any], Any]]:
    """Register a process that must not outlive the test, whatever happens."""
    processes: list[Any] = []

    def register(process: Any) -> Any:
        processes.append(process)
        return process

    yield register
    for process in processes:
        if process.poll() is None:
            for child in psutil.Process(process.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
            process.kill()
        process.communicate()


@pytest.fixture
def free_port() -> Iterator[Callable[[], int]]:
    """Find ports for launchers that no other process on this machine uses before the end of the test."""
    with contextlib.ExitStack() as reserved:
        yield lambda: reserved.enter_context(reserved_port())


@pytest.fixture
def wait_until() -> Callable[..., None]:
    """Wait for a condition, or fail."""

    def wait(condition: Callable[[], bool], what: str, seconds: float = 90) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
            time.sleep(0.05)

    return wait


@pytest.fixture
def sleepers(shell: Shell, started: Callable[..., Any], wait_until: Callable[..., None]) -> Callable[..., Any]:
    """Start a two-rank launch whose ranks write their pids and sleep; returns the launcher and the pids."""

    def start(extra: str = "", fresh: bool = False) -> tuple[Any, list[int]]:
        script = (
            "import os, signal, sys, time, pathlib\n"
            + extra
            + "\npathlib.Path('pid' + os.environ['RANK']).write_text(str(os.getpid()))\n"
        )
        script += "time.sleep(300)\n"
        (shell.folder / "sleep.py").write_text(script)
        begin = shell.start if fresh else shell.fork  # fresh: in an interpreter of its own
        launcher = started(begin("launch", "--cpu", "--num_processes", "2", "sleep.py"))
        files = [shell.folder / "pid0", shell.folder / "pid1"]
        wait_until(lambda: all(file.exists() and file.read_text() for file in files), "both ranks run")
        return launcher, [int(file.read_text()) for file in files]

    return start


@pytest.fixture
def ended(wait_until: Callable[..., None]) -> Callable[[list[int]], None]:
    """Check that processes end soon (a zombie has ended); kill them otherwise."""

    def check(pids: list[int], seconds: float = 60) -> None:
        def alive() -> list[int]:
            return [pid for pid in pids if _is_alive(pid)]

        try:
            wait_until(lambda: not alive(), f"processes {pids} end", seconds)
        finally:
            for pid in alive():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    return check


def _is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class Cable:
    """Forwards connections to a port, until it is cut: then nothing arrives, and nothing is closed."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = listen("127.0.0.1", 0)
        self.port = self._listener.getsockname()[1]
        self.plugged = threading.Event()
        self.plugged.set()
        self._near: set[socket.socket] = set()
        self._stalled: set[socket.socket] = set()
        self._ended = False
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while not self._ended:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            self.plugged.wait()
            try:
                far = socket.create_connection(("127.0.0.1", self._target))
            except OSError:  # what listened there has ended
                near.close()
                continue
            self._near.add(near)
            for source, target in ((near, far), (far, near)):
                threading.Thread(target=self._pass_on, args=(source, target), daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(4096):
                self.plugged.wait()
                if source not in self._stalled:
                    target.sendall(data)
            target.shutdown(socket.SHUT_RDWR)
        except OSError:
            source.close()

    def stall(self) -> None:
        """From now on nothing arrives at the port by the present connections; the other direction works."""
        self._stalled |= self._near

    def drop(self) -> None:
        """End the present connections; others can be made."""
        for near in self._near:
            near.shutdown(socket.SHUT_RDWR)

    def refuse(self) -> None:
        """From now on no connection can be made; the present ones stay."""
        self._listener.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._ended = True
        self.plugged.set()
        self._listener.close()


@pytest.fixture
def cable():
    """Make cables, which are removed at the end."""
    made = []

    def make(port: int) -> Cable:
        made.append(Cable(port))
        return made[-1]

    yield make
    for one in made:
        one.close()

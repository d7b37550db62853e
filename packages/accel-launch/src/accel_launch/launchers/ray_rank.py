"""A rank of a run on Ray: an actor that runs the script in a process of its own, and passes its output on.

The script's exit code, its signals and its output are those of a process, which an actor does not have. Torch-free.
"""

from __future__ import annotations

import contextlib
import os
import queue
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from accel_state.env import all_variables
from accel_state.ports import loopback_variables, reserved_port
from accel_state.preemption import Note, read_note

from ..doctor.machine import versions
from ..elastic.report import RankFailure, has_ended, read_failure
from ..entrypoint import WORKER, Entrypoint, worker_command
from ..network.interfaces import interface_variables
from ..supervisor import Child, stop

READ_SECONDS = 1.0
"""How long an actor waits for output before it answers that there is none."""
LOST_GRACE_SECONDS = 5.0
"""How long a rank whose launcher is lost may take to end after SIGTERM."""

_QUEUED = 2000  # pieces of output that wait for the launcher; with more, the script waits
_ANSWERED = 500  # pieces of output in one answer
_PIECE = 1 << 16
_LOOK_SECONDS = 0.5
_ORPHAN_SECONDS = 2.0
# How the variables end with which Ray restricts an actor to its devices.
_DEVICES = re.compile(r"_VISIBLE_(DEVICES|MODULES)$")
# Progress bars end their lines with a carriage return.
_LINE = re.compile(rb"[^\r\n]*(?:\r\n|[\r\n])")


@dataclass(frozen=True)
class Place:
    """Where an actor is, and what Ray has given it."""

    node: str  # id of the node
    host: str  # its name
    address: str  # its address
    pid: int  # of the actor
    devices: Mapping[str, str]  # variables with which Ray says which devices are its own
    versions: Mapping[str, str]  # of the packages that must be the same everywhere


@dataclass(frozen=True)
class End:
    """How a rank ended."""

    failure: RankFailure | None  # None if it succeeded, or was ended by the launcher before it reported a failure
    completed: bool  # whether its script had ended without an error


@dataclass(frozen=True)
class Answer:
    """What has happened since the last answer."""

    output: Sequence[tuple[int, bytes]] = ()  # 1 (stdout) or 2 (stderr), and a line
    note: Note | None = None  # what the rank says about saving on signals
    end: End | None = None  # None while it runs


@dataclass
class RankActor:
    """The actor; its methods run in several threads.

    Args:
        silence: after so many seconds without a question from the launcher the rank is ended, since another one may
            have taken its place; 0: never.
    """

    silence: float
    _child: Child | None = None
    _ranks: tuple[int, int] = (0, 0)
    _reports: Path | None = None  # where the rank reports how it ends
    _last_note: Note | None = None
    _stopped: bool = False  # whether the launcher ended it
    _end: End | None = None
    _error: OSError | None = None
    _heard: float = field(default_factory=time.monotonic)
    _output: queue.Queue[tuple[int, bytes]] = field(default_factory=lambda: queue.Queue(_QUEUED))
    _started: threading.Event = field(default_factory=threading.Event)
    _open: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def place(self) -> Place:
        """Return where this is."""
        import ray

        devices = {name: value for name, value in all_variables().items() if _DEVICES.search(name)}
        node, address = ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()
        return Place(node, socket.gethostname(), address, os.getpid(), devices, versions())

    def port(self) -> int:
        """Return a free port of this node, which is kept for the rank."""
        return self._open.enter_context(reserved_port())

    def start(self, entrypoint: Entrypoint, directory: str | None, variables: Mapping[str, str], alone: bool) -> int:
        """Start the rank, and return its process id.

        Args:
            entrypoint: what it runs.
            directory: where it runs; None for the directory that Ray has brought here.
            variables: those of the rank, on top of those of this actor.
            alone: whether all ranks are on this machine.

        Raises:
            FileNotFoundError: the directory or the script is not on this node.
            OSError: the process cannot be started.
        """
        directory = directory or os.getcwd()
        if not os.path.isdir(directory):
            raise FileNotFoundError(f"the directory {directory} does not exist")
        if entrypoint.kind != "module" and not os.path.exists(os.path.join(directory, entrypoint.name)):
            raise FileNotFoundError(f"{entrypoint.name} does not exist (looked in {directory})")
        reports = Path(tempfile.mkdtemp(prefix="accel_ray_"))
        network = loopback_variables() if alone else interface_variables(self.place().address)
        own = {"TORCHELASTIC_ERROR_FILE": str(reports / "error.json")}
        inherited = {name: value for name, value in all_variables().items() if value}
        environment = {**network, **inherited, **variables, **own}
        # Ray finds the modules that it has brought here by this variable.
        paths = [one["PYTHONPATH"] for one in (inherited, variables) if one.get("PYTHONPATH")]
        environment |= {"PYTHONPATH": os.pathsep.join(paths)} if paths else {}
        self._ranks, self._heard = (int(variables["RANK"]), int(variables["LOCAL_RANK"])), time.monotonic()
        # A thread for as long as the process: the kernel ends a process with the thread that started it.
        threading.Thread(target=self._run, args=(entrypoint, directory, environment, reports), daemon=True).start()
        self._started.wait()
        if self._error is not None:
            raise self._error
        assert self._child is not None
        if self.silence:
            threading.Thread(target=self._end_if_lost, daemon=True).start()
        return self._child.pid

    def read(self, seconds: float = READ_SECONDS) -> Answer:
        """Return what has happened since the last call; waits up to so many seconds for something to happen."""
        self._heard = time.monotonic()
        end, pieces = self._end, []  # before the output, so that nothing comes after the last of it
        with contextlib.suppress(queue.Empty):
            pieces.append(self._output.get(timeout=0 if end else seconds))
            while len(pieces) < _ANSWERED:
                pieces.append(self._output.get_nowait())
        self._heard = time.monotonic()
        is_last = end is not None and len(pieces) < _ANSWERED
        return Answer(pieces, self._note(), end if is_last else None)

    def send(self, number: int) -> None:
        """Send the rank a signal."""
        if self._child is not None:
            self._child.send(number)

    def stop(self, number: int, seconds: float) -> None:
        """End the rank: send it a signal, and kill it if it has not ended after so many seconds."""
        if self._child is None or self._child.poll() is not None:
            return
        self._stopped, note = True, self._note()
        if note is not None and number in note.signals:
            seconds = max(seconds, note.grace_seconds)
        stop([self._child], number, seconds)

    def _note(self) -> Note | None:
        if self._reports is not None:
            self._last_note = read_note(self._reports) or self._last_note
        return self._last_note

    def _run(self, entrypoint: Entrypoint, directory: str, environment: Mapping[str, str], reports: Path) -> None:
        # Ray blocks SIGINT in its processes; this thread's mask is inherited.
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        command, pipes = worker_command(entrypoint, os.getpid()), {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        self._reports = reports
        try:
            options: dict[str, Any] = {"cwd": directory, "stdin": subprocess.DEVNULL, **pipes}
            child = self._child = Child.start(command, environment, **options)
        except OSError as error:
            self._error = error
            shutil.rmtree(reports, ignore_errors=True)
            return
        finally:
            self._started.set()
        process = child.process
        assert isinstance(process, subprocess.Popen) and process.stdout is not None and process.stderr is not None
        streams = ((1, process.stdout), (2, process.stderr))
        readers = [threading.Thread(target=self._copy, args=stream, daemon=True) for stream in streams]
        for reader in readers:
            reader.start()
        code = process.wait()
        failure = read_failure(*self._ranks, child.pid, 0 if self._stopped else code, reports)
        child.end_group()
        for reader in readers:
            reader.join(_ORPHAN_SECONDS)
            # What the rank has left running may keep the pipe open.
            while reader.is_alive() and not self._output.empty():
                reader.join(_ORPHAN_SECONDS)
        self._note()
        end = End(failure if failure.exit_code else None, has_ended(child.pid, reports))
        shutil.rmtree(reports, ignore_errors=True)
        self._end = end

    def _copy(self, number: int, stream: IO[bytes]) -> None:
        rest = b""
        while piece := os.read(stream.fileno(), _PIECE):
            rest += piece
            end = 0
            for line in _LINE.finditer(rest):
                self._output.put((number, line[0]))
                end = line.end()
            rest = rest[end:]
            if len(rest) > _PIECE:
                self._output.put((number, rest))
                rest = b""
        if rest:
            self._output.put((number, rest))

    def _end_if_lost(self) -> None:
        """End the rank and this actor if the launcher, or the way to it, is lost."""
        while time.monotonic() - self._heard < self.silence:
            time.sleep(_LOOK_SECONDS)
        if self._child is not None and self._child.poll() is None:
            self._stopped = True
            stop([self._child], signal.SIGTERM, LOST_GRACE_SECONDS)
        os._exit(1)


def end_rank(pid: int, files: Sequence[Path] = ()) -> None:
    """Kill a rank of this machine whose actor has been killed, and wait until it has ended.

    Args:
        pid: of the rank.
        files: what it and its actor have left, to be removed.
    """
    import psutil

    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        if WORKER.as_posix() in process.cmdline():  # and not another process with its number
            process.kill()
            psutil.wait_procs([process])
    for file in files:
        file.unlink(missing_ok=True)

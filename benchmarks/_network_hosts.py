"""Launchers on hosts that are network namespaces, for network_faults.py."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

import psutil

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from components import namespaces

from accel_state import run_token


def _variables() -> dict[str, str]:
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("ACCEL", "GLOO", "NCCL"))}
    return variables | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


TOKEN = {run_token.VARIABLE: run_token.make_token()}
"""Of the runs with replicas."""


class Server:
    """A process on a host that has imported torch, and forks launchers (_network_preloaded.py)."""

    def __init__(self, hosts: namespaces.Hosts, host: int) -> None:
        self._host, self._lock = host, threading.Lock()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        script = str(Path(__file__).with_name("_network_preloaded.py"))
        command = hosts.command(host, [sys.executable, script, str(theirs.fileno())])
        self._process = subprocess.Popen(command, env=_variables(), pass_fds=[theirs.fileno()])
        theirs.close()
        self._answer()

    def _answer(self) -> int:
        return int(self._socket.recv(100))

    def fork(self, folder: Path, restarts: int) -> ForkedLauncher:
        """Start a launcher."""
        ours, theirs = os.pipe()
        request = {"host": self._host, "folder": str(folder), "restarts": restarts}
        with self._lock:
            socket.send_fds(self._socket, [json.dumps(request).encode()], [theirs])
            pid = self._answer()
        os.close(theirs)
        return ForkedLauncher(self, pid, os.fdopen(ours))

    def wait(self, pid: int) -> int:
        """The exit code of a launcher that has ended."""
        with self._lock:
            self._socket.send(json.dumps({"pid": pid}).encode())
            return self._answer()

    def close(self) -> None:
        """End it."""
        self._socket.close()
        self._process.kill()
        self._process.wait()


@dataclass
class ForkedLauncher:
    """What is used of the interface of Popen."""

    server: Server
    pid: int
    stdout: TextIO
    returncode: int | None = None

    def wait(self) -> None:
        """Wait for the exit code, once it has closed its output."""
        self.returncode = self.server.wait(self.pid)

    def poll(self) -> int | None:
        """The exit code; None before it is known."""
        return self.returncode


class Host:
    """The launcher of one host, and the lines that it prints with their times."""

    def __init__(self, process: subprocess.Popen[str] | ForkedLauncher) -> None:
        self.lines: list[tuple[float, str]] = []
        self.ended = 0.0
        self.process = process
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @classmethod
    def start(cls, hosts: namespaces.Hosts, host: int, words: Sequence[str], folder: Path) -> Host:
        """Start a command on a host."""
        return cls(
            subprocess.Popen(
                hosts.command(host, list(words)),
                cwd=folder,
                env=_variables() | (TOKEN if "--ft" in words else {}),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )

    def _read(self) -> None:
        assert self.process.stdout is not None
        for text in self.process.stdout:
            self.lines.append((time.monotonic(), text.rstrip()))
        self.process.wait()
        self.ended = time.monotonic()

    def wait(self, seconds: float) -> bool:
        """Whether it ends within so many seconds."""
        self._reader.join(seconds)
        return not self._reader.is_alive()

    def sentences(self, since: float) -> list[tuple[float, str]]:
        """What the launcher said after a moment, with the seconds since then."""
        return [(at - since, text) for at, text in self.lines if at >= since and text.startswith("accel launch:")]

    def text(self) -> str:
        """Everything it printed."""
        return "\n".join(text for _, text in self.lines)

    def launcher(self) -> psutil.Process:
        """The process of the launcher: unshare and bash have become it."""
        return psutil.Process(self.process.pid)

    def processes(self) -> str:
        """Its processes with the state and seconds of CPU of each: these tell one that hangs from one that starves."""
        texts = []
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in [self.launcher(), *self.launcher().children(recursive=True)]:
                with contextlib.suppress(psutil.NoSuchProcess), process.oneshot():
                    name, times = " ".join(process.cmdline())[-40:], process.cpu_times()
                    texts.append(f"{process.status()}, {times.user + times.system:.1f} s of CPU (...{name})")
        return "; ".join(texts)

    def kill(self) -> None:
        """End it with everything that it started, as a machine that loses its power would."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in [*self.launcher().children(recursive=True), self.launcher()]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()


@dataclass
class Run:
    """Two launchers on two hosts."""

    hosts: namespaces.Hosts
    folder: Path
    launchers: list[Host] = field(default_factory=list)
    fault_at: float = 0.0
    words: list[list[str]] = field(default_factory=list)
    servers: Sequence[Server] = ()  # by host, where launchers are forks
    restarts: int = 0  # of launchers that are forks
    stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def start(self, host: int) -> None:
        """Start, or start again, the launcher of a host."""
        place = self.folder / f"host{host}"
        place.mkdir(exist_ok=True)
        if self.servers:
            launcher = Host(self.servers[host].fork(place, self.restarts))
        else:
            launcher = Host.start(self.hosts, host, self.words[host], place)
        if host < len(self.launchers):
            self.launchers[host] = launcher
        else:
            self.launchers.append(launcher)

    def steps(self) -> int:
        """Steps that were trained."""
        with contextlib.suppress(OSError, ValueError):
            return int((self.folder / "host0" / "steps").read_text())
        return 0

    def trained(self, steps: int = 10, seconds: float = 600) -> None:
        """Wait for some steps, and note the time: now comes the fault."""
        deadline = time.monotonic() + seconds
        while self.steps() < steps:
            if time.monotonic() > deadline or all(one.process.poll() is not None for one in self.launchers):
                raise RuntimeError("no training: " + " | ".join(one.text()[-2000:] for one in self.launchers))
            time.sleep(0.05)
        self.now()

    def now(self) -> None:
        """Note the moment of the fault."""
        self.fault_at = time.monotonic()

    def digest(self) -> str:
        """What the script wrote at its end."""
        with contextlib.suppress(OSError):
            return (self.folder / "host0" / "digest").read_text()
        return ""

    def one_way(self, lost: bool) -> None:
        """Lose all packets from host1 to host0, by a wrong hardware address."""
        name, device = self.hosts.names[1], self.hosts.cables[1]
        words = "replace 10.77.0.1 lladdr 02:00:00:00:00:99" if lost else "del 10.77.0.1"
        subprocess.run(["ip", "-n", name, "neigh", *words.split(), "dev", device], check=True)

    def close(self) -> None:
        """End what still runs, and mend the cable."""
        for launcher in self.launchers:
            launcher.kill()
            launcher.wait(10)
        self.stack.close()

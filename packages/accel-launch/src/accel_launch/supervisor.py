"""Processes that a launcher starts: signals reach them, they are ended in order, and the launcher ends in any case.

Every launcher that stays uses it: for ranks, for replicas, and for programs such as mpirun that start ranks.

A handler only notes a signal, and interrupts the main thread where it waits (:meth:`SignalWatch.interruptible`), so
that no process is started without being known. A call into a store may block the main thread for minutes, so a thread
that receives signals at once enforces the end. Torch-free.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any

SIGNALS: tuple[signal.Signals, ...] = (signal.SIGINT, signal.SIGTERM)
"""Signals that end a launcher."""
FORWARDED: tuple[signal.Signals, ...] = ()
"""Signals that are meant for the processes; the launcher forwards them."""
if sys.platform != "win32":
    SIGNALS += (signal.SIGHUP, signal.SIGQUIT)
    FORWARDED += (signal.SIGUSR1, signal.SIGUSR2)

GRACE_SECONDS = 30.0
"""How long processes may take to end after a signal, before they are killed."""
STUCK_SECONDS = 5.0
"""How long the launcher itself may take to end once no process is left."""

# Counted in looks: time during which this machine was suspended does not count.
_LOOK_SECONDS = 0.1
_POLL_SECONDS = 0.02


class Interrupted(BaseException):
    """A signal has asked this launcher to end."""

    def __init__(self, number: int) -> None:
        super().__init__(f"received signal {number}")
        self.number = number


class Child:
    """A process that this one has started.

    Args:
        process: the process.
        leads_group: whether signals also go to what it starts.
    """

    def __init__(self, process: subprocess.Popen[bytes] | BaseProcess, leads_group: bool) -> None:
        self.process = process
        self._leads_group = leads_group and sys.platform != "win32"
        self.pid: int = int(process.pid or 0)

    @classmethod
    def start(cls, command: Sequence[str], environment: Mapping[str, str], **options: Any) -> Child:
        """Start a command in a session of its own: a signal from the terminal reaches the launcher alone.

        Args:
            command: program and arguments.
            environment: all variables.
            options: further arguments of :class:`subprocess.Popen`.

        Raises:
            OSError: it cannot be started.
        """
        own = sys.platform != "win32"
        return cls(subprocess.Popen(command, env=dict(environment), start_new_session=own, **options), own)

    def poll(self) -> int | None:
        """Return the exit code, -N after signal N; None while it runs."""
        return self.process.exitcode if isinstance(self.process, BaseProcess) else self.process.poll()

    def send(self, number: int) -> None:
        """Send a signal to the process, or to its group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if self._leads_group:
                os.killpg(self.pid, number)
            else:
                os.kill(self.pid, number)

    def end_group(self) -> None:
        """End what the process left running in its group: servers, orphaned workers."""
        if self._leads_group:
            self.send(signal.SIGTERM)


def stop(children: Iterable[Child], number: int = signal.SIGTERM, seconds: float = GRACE_SECONDS) -> None:
    """Send a signal to processes, wait until they have ended, and kill those that do not."""
    running = [child for child in children if child.poll() is None]
    for child in running:
        child.send(number)
    for limit, last in ((seconds, signal.SIGTERM if sys.platform == "win32" else signal.SIGKILL), (GRACE_SECONDS, 0)):
        deadline = time.monotonic() + limit
        while (running := [child for child in running if child.poll() is None]) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        for child in running if last else ():
            child.send(last)


def send(pids: Iterable[int], number: int) -> int:
    """Send a signal to processes, and return how many of them existed."""
    count = 0
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
            count += 1
    return count


class Supervised:
    """What a launcher has started: processes without special needs, if no subclass says more.

    Args:
        children: the processes.
    """

    def __init__(self, *children: Child) -> None:
        self._children = children

    def pids(self) -> Iterable[int]:
        """Process ids to forward signals to."""
        return [child.pid for child in self._children]

    def grace_seconds(self, number: int) -> float:
        """Return how long the processes may take to end after a signal, if they need more than others."""
        return 0.0

    def shutdown_seconds(self) -> float:
        """Return how long the launcher may take to tell other machines that its processes have ended."""
        return 0.0


class SignalWatch:
    """A context that handles signals as the module describes, and restores the former handlers.

    Outside the main thread, where Python allows no handlers, it does nothing.

    Args:
        owns_process: whether this process exists to launch, so that it may be ended; a notebook's kernel may not.
    """

    def __init__(self, owns_process: bool = True) -> None:
        # Windows has no wakeup pipe; the handlers have to suffice there.
        self._owns_process = owns_process and sys.platform != "win32"
        self._active = threading.current_thread() is threading.main_thread()
        self.supervised: Supervised = Supervised()
        """The receiver of signals."""
        self.received: int = 0
        """The first signal that asked the launcher to end, or 0."""
        self.forwarded: int = 0
        """The latest signal that was forwarded, or 0."""
        self._has_raised = self._may_raise = self._is_starting = False
        self._held: list[int] = []
        self._ended = threading.Event()

    def __enter__(self) -> SignalWatch:
        if not self._active:
            return self
        self._former = {number: signal.getsignal(number) for number in (*SIGNALS, *FORWARDED)}
        for number, former in self._former.items():
            # nohup ignores SIGHUP, and a shell SIGINT for background jobs: that must stay.
            if former is not signal.SIG_IGN:
                signal.signal(number, self._forward if number in FORWARDED else self._note)
        if self._owns_process:
            self._reader, self._writer = os.pipe()
            os.set_blocking(self._writer, False)
            self._former_fd = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
            threading.Thread(target=self._watch, name="accel-launch-signals", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if not self._active:
            return
        for number, handler in self._former.items():
            signal.signal(number, handler)
        if self._owns_process:
            signal.set_wakeup_fd(self._former_fd)
            os.close(self._writer)

    @property
    def unheeded(self) -> int:
        """A signal that asked the launcher to end when it was about to end, or 0."""
        return 0 if self._has_raised else self.received

    def check(self) -> None:
        """Raise Interrupted if a signal has been noted, the first time."""
        if self.received and not self._has_raised:
            self._has_raised = True
            raise Interrupted(self.received)

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """End the block with Interrupted as soon as a signal arrives."""
        self._may_raise = True
        try:
            self.check()
            yield
        finally:
            self._may_raise = False

    @contextlib.contextmanager
    def starting(self, *, forks: bool = False) -> Iterator[None]:
        """Deliver signals that arrive while the block starts processes after it.

        Args:
            forks: whether they are forks of this process. Signals are then blocked in them too, until they have
                handlers of their own: this process's would swallow them.
        """
        self._is_starting = True
        try:
            with _blocked_signals() if forks else contextlib.nullcontext():
                yield
        finally:
            self._is_starting = False
        self.check()
        held, self._held = self._held, []
        for number in held:
            self._forward(number, None)

    def _forward(self, number: int, frame: FrameType | None) -> None:
        if self._is_starting:
            self._held.append(number)
        elif send(self.supervised.pids(), number):
            self.forwarded = number
        else:
            self._note(number, frame)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = self.received or number
        if self._may_raise:
            self.check()

    def _watch(self) -> None:
        """Read signal numbers from the wakeup pipe until it is closed."""
        first: int | None = None
        while data := os.read(self._reader, 1):
            number = data[0]
            if number not in SIGNALS:
                continue  # other signals, such as SIGCHLD, arrive here too
            if first is None:
                first = number
                threading.Thread(target=self._enforce, args=(number,), daemon=True).start()
            else:
                _exit_now(first)
        os.close(self._reader)

    def _enforce(self, number: int) -> None:
        """End the launcher if the main thread does not."""
        import psutil

        shutdown, grace = self.supervised.shutdown_seconds(), self.supervised.grace_seconds(number)
        remaining, alone = max(GRACE_SECONDS, grace) + STUCK_SECONDS + shutdown, 0.0
        while not self._ended.wait(_LOOK_SECONDS):
            remaining -= _LOOK_SECONDS
            alone = 0.0 if psutil.Process().children() else alone + _LOOK_SECONDS
            if remaining < 0 or alone > STUCK_SECONDS + shutdown:
                _exit_now(number)


def _exit_now(number: int) -> None:
    kill_descendants()
    os._exit(128 + number)


def kill_descendants() -> None:
    """Kill all child processes, and theirs."""
    import psutil  # needed after a signal only; importing it takes 2% of a launch

    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


@contextlib.contextmanager
def _blocked_signals() -> Iterator[None]:
    """Block signals in this thread, and in its forks until they unblock them."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)

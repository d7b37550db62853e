"""Forwards signals from the launcher to the ranks, and ends the launcher in any case.

torch's agent turns a signal into an exception in the main thread. That is not enough: a call into the rendezvous store
delays the exception for minutes, and a second signal interrupts the clean-up after the first and leaves orphans. Here
only the first signal raises, and a thread that is told of signals at once enforces the end.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from types import FrameType

from torch.distributed.elastic.multiprocessing import SignalException

from .._torch_compat import separate_starts, signal_handler
from .preemption import FORWARDED, send

SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT") if hasattr(signal, name))

GRACE_SECONDS = 35.0
"""How long ranks may take to end after a signal: torch's agent kills those that ignore it after 30 s."""

STUCK_SECONDS = 5.0
"""How long the launcher itself may take to end once no rank is left."""

# Both are counted in looks: time during which this machine was suspended does not count.
_LOOK_SECONDS = 0.1


class SignalWatch:
    """A context that handles signals as the module describes, and restores the former handlers.

    Outside the main thread, where Python allows no handlers, it does nothing.

    Args:
        owns_process: whether this process exists to launch, so that it may be ended; a notebook's kernel may not.
    """

    def __init__(self, owns_process: bool = True) -> None:
        # Windows has no wakeup pipe; torch's own handling has to suffice there.
        self._owns_process = owns_process and sys.platform != "win32"
        self._active = threading.current_thread() is threading.main_thread()
        self.received: signal.Signals | None = None
        self.forwarded: signal.Signals | None = None
        """The latest signal that was forwarded to the ranks."""
        self.ranks: Callable[[], Iterable[int]] = tuple
        """Returns the process ids to forward signals to."""
        self.grace: Callable[[int], float] = lambda number: 0.0
        """Returns how many seconds ranks may take to end after a signal, if more than usual."""
        self.farewell: Callable[[], float] = lambda: 0.0
        """Returns how many seconds the launcher may take to tell other machines that its ranks have ended."""
        self._starting = self._postponed = False
        self._waiting: list[int] = []
        self._ended = threading.Event()

    def __enter__(self) -> SignalWatch:
        if self._active:
            self._former = {number: signal.getsignal(number) for number in (*SIGNALS, *FORWARDED)}
            self.install()
        if self._active and self._owns_process:
            self._reader, self._writer = os.pipe()
            os.set_blocking(self._writer, False)
            self._former_fd = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
            threading.Thread(target=self._watch, name="accel-launch-signals", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if not self._active:
            return
        self._postponed = True
        for number, handler in self._former.items():
            signal.signal(number, handler)
        if self._owns_process:
            signal.set_wakeup_fd(self._former_fd)
            os.close(self._writer)
        while self._waiting:
            number = self._waiting.pop(0)
            if number in SIGNALS or self.received is None:  # others were meant for ranks that have been ended
                signal.raise_signal(number)  # for the former handlers

    def install(self) -> None:
        """Set the handlers; repeated after torch's agent has started processes, which sets its own."""
        for number in (*SIGNALS, *FORWARDED) if self._active else ():
            # nohup ignores SIGHUP, and a shell SIGINT for background jobs: that must stay.
            ignored = self._former[number] is signal.SIG_IGN
            signal.signal(number, signal.SIG_IGN if ignored else self._handler_of(number))

    def _handler_of(self, number: int) -> Callable[[int, FrameType | None], None]:
        return self._forward if number in FORWARDED else self._handle

    @contextlib.contextmanager
    def starting_ranks(self, commands: bool, forks: bool = False) -> Iterator[None]:
        """Let signals end the launcher and the ranks while these are being started.

        Args:
            commands: whether ranks run a command: a signal then takes effect between the starts of two of them.
                Signals are postponed until all ranks of a function are known: an exception in between would leave
                behind the first ones.
            forks: whether ranks are forks of this process. Signals are then blocked in them too, until they have
                handlers of their own: this process's would swallow them.
        """
        self._starting, self._postponed = True, not commands
        separate = separate_starts(self.install, self._postpone) if commands else contextlib.nullcontext()
        try:
            with signal_handler(self._handle), separate, _blocked_signals() if forks else contextlib.nullcontext():
                yield
        finally:
            self._starting = self._postponed = False
            self.install()
        self._handle_waiting((*SIGNALS, *FORWARDED))

    @contextlib.contextmanager
    def _postpone(self) -> Iterator[None]:
        self._postponed = True
        try:
            yield
        finally:
            self._postponed = False
        self._handle_waiting(SIGNALS)

    def _handle_waiting(self, numbers: Iterable[int]) -> None:
        for number in [number for number in self._waiting if number in numbers]:
            self._waiting.remove(number)
            if self._former[number] is not signal.SIG_IGN:  # torch's agent also handles ignored signals
                self._handler_of(number)(number, None)

    def _forward(self, number: int, frame: FrameType | None) -> None:
        if self._starting:  # the ranks are not known yet
            self._waiting.append(number)
        elif send(self.ranks(), number):
            self.forwarded = signal.Signals(number)
        else:
            self._handle(number, frame)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._postponed:
            self._waiting.append(number)
        elif self.received is None:
            self.received = signal.Signals(number)
            raise SignalException(f"received {self.received.name}", self.received)

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

        farewell = self.farewell()
        remaining, alone = max(GRACE_SECONDS, self.grace(number) + STUCK_SECONDS) + farewell, 0.0
        while not self._ended.wait(_LOOK_SECONDS):
            remaining -= _LOOK_SECONDS
            alone = 0.0 if psutil.Process().children() else alone + _LOOK_SECONDS
            if remaining < 0 or alone > STUCK_SECONDS + farewell:
                _exit_now(number)


def _exit_now(number: int) -> None:
    kill_descendants()
    os._exit(128 + number)


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


def kill_descendants() -> None:
    """Kill all child processes, and theirs."""
    import psutil  # needed after a signal only; importing it takes 2% of a launch

    for process in psutil.Process().children(recursive=True):
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue


def end_groups(pids: list[int]) -> None:
    """End what ranks left running in their process groups, which each rank leads: servers, orphaned workers."""
    for pid in pids if sys.platform != "win32" else ():
        try:
            os.killpg(pid, signal.SIGTERM)
        except (ProcessLookupError, PermissionError):
            # The group is empty, or its number is in use by another user's process.
            continue

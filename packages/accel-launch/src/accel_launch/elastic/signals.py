"""Signals to the launcher reach the ranks, and end the launcher in any case.

torch's agent turns a signal into an exception in the main thread. That is not enough: while the main thread is inside a
call to the rendezvous store the exception waits for it, for minutes, and a second signal interrupts the clean-up after
the first, which leaves orphans. Here the first signal alone raises; a thread that hears of signals at once watches what
becomes of it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from types import FrameType, TracebackType

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing import api as torch_processes

from .preemption import FORWARDED, send

SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT") if hasattr(signal, name))

GRACE_SECONDS = 35.0
"""How long ranks may take to end after a signal: torch's agent kills those that ignore it after 30 s."""

STUCK_SECONDS = 5.0
"""How long the launcher itself may take to end once no rank is left."""

# Both are counted in looks: a machine that stood still for a while has not given anybody that time.
_LOOK_SECONDS = 0.1
# What torch's agent installs whenever it starts processes.
_TORCHS_HANDLER = "_terminate_process_handler"


class SignalWatch:
    """A context in which signals are handled as the module says; the former handlers are back afterwards.

    Outside the main thread, where Python allows no handlers, it does nothing.

    Args:
        owns_process: whether this process exists to launch, so that it may be ended; a notebook's kernel may not.
    """

    def __init__(self, owns_process: bool = True) -> None:
        # Windows wakes nobody through a pipe; torch's own handling is all there is.
        self._owns_process = owns_process and sys.platform != "win32"
        self._active = threading.current_thread() is threading.main_thread()
        self.received: signal.Signals | None = None
        self.forwarded: signal.Signals | None = None
        """The latest signal that was handed on to the ranks."""
        self.ranks: Callable[[], Iterable[int]] = tuple
        """Tells the processes that signals are handed on to."""
        self.grace: Callable[[int], float] = lambda number: 0.0
        """Tells how long ranks may take to end after a signal, beyond what is usual."""
        self.farewell: Callable[[], float] = lambda: 0.0
        """Tells how long the launcher may take to tell other machines that its ranks have ended."""
        self._postponed = False
        self._waiting: list[int] = []
        self._ended = threading.Event()

    def __enter__(self) -> SignalWatch:
        if self._active:
            self._former = {number: signal.getsignal(number) for number in (*SIGNALS, *FORWARDED)}
            self.install()
        if self._active and self._owns_process:
            self._start_watching()
        return self

    def _start_watching(self) -> None:
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._former_fd = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, name="accel-launch-signals", daemon=True).start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
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
            # To whoever had it before.
            signal.raise_signal(self._waiting.pop(0))

    def install(self) -> None:
        """Take the handlers; torch's agent sets its own whenever it starts processes, so it is called again after that."""
        for number in (*SIGNALS, *FORWARDED) if self._active else ():
            # What is ignored on purpose stays so: nohup ignores SIGHUP, and a shell SIGINT for what it starts in the
            # background.
            signal.signal(
                number, signal.SIG_IGN if self._former[number] is signal.SIG_IGN else self._handler_of(number)
            )

    def _handler_of(self, number: int) -> Callable[[int, FrameType | None], None]:
        return self._forward if number in FORWARDED else self._handle

    @contextlib.contextmanager
    def starting_ranks(self, forks: bool = False) -> Iterator[None]:
        """Keep signals until all ranks are known: one that raised before would leave behind those that run already.

        The handler that torch's agent installs raises at once; here it installs this one.

        Args:
            forks: whether ranks are forks of this process. A signal to one of them is then held back, in it too, until
                it has handlers of its own: with this process's it would keep the signal, and do nothing.
        """
        torchs = getattr(torch_processes, _TORCHS_HANDLER, None)
        self._postponed = True
        setattr(torch_processes, _TORCHS_HANDLER, self._handle)
        try:
            with _held_back() if forks else contextlib.nullcontext():
                yield
        finally:
            self._postponed = False
            setattr(torch_processes, _TORCHS_HANDLER, torchs)
            self.install()
        while self._waiting:
            number = self._waiting.pop(0)
            if self._former[number] is not signal.SIG_IGN:  # torch's agent takes what was ignored, too
                self._handler_of(number)(number, None)

    def _forward(self, number: int, frame: FrameType | None) -> None:
        if self._postponed:
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
        first: int | None = None
        while number := self._next_signal():
            if number not in SIGNALS:
                continue  # SIGCHLD and the like come through the same pipe
            if first is None:
                first = number
                threading.Thread(target=self._enforce, args=(number,), daemon=True).start()
            else:
                self._leave_now(first)

    def _next_signal(self) -> int | None:
        data = os.read(self._reader, 1)
        if not data:
            os.close(self._reader)
            return None
        return data[0]

    def _enforce(self, number: int) -> None:
        """Leave when the main thread does not get to it."""
        import psutil

        farewell = self.farewell()
        left, alone = max(GRACE_SECONDS, self.grace(number) + STUCK_SECONDS) + farewell, 0.0
        while not self._ended.wait(_LOOK_SECONDS):
            left -= _LOOK_SECONDS
            alone = 0.0 if psutil.Process().children() else alone + _LOOK_SECONDS
            if left < 0 or alone > STUCK_SECONDS + farewell:
                self._leave_now(number)

    def _leave_now(self, number: int) -> None:
        kill_descendants()
        os._exit(128 + number)


@contextlib.contextmanager
def _held_back() -> Iterator[None]:
    """Signals to this thread, and to what it forks, wait until the context is left, and in a fork until it asks for
    them.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def kill_descendants() -> None:
    """Kill every process that this one started, and what those started."""
    import psutil  # only a signal needs it, and it takes a launch two hundredths of its time

    for process in psutil.Process().children(recursive=True):
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue


def end_groups(pids: list[int]) -> None:
    """End what ranks left running in their process groups (each rank leads one): servers, workers that outlived them."""
    for pid in pids if sys.platform != "win32" else ():
        try:
            os.killpg(pid, signal.SIGTERM)
        except (ProcessLookupError, PermissionError):
            # Nothing of the group is left, or its number belongs to somebody else by now.
            continue

"""The way from the training loop to one tracker: a bounded queue, and a thread that empties it."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from accel_state.errors import ConfigurationError

from .base import GeneralTracker, TrackerError

logger = logging.getLogger(__name__)

Call = Callable[[], Any]
_GATHERING_SECONDS = 0.05
_ROUNDS = 20
_NAP_SECONDS = 0.1


@dataclass(frozen=True)
class Delivery:
    """How values get from the loop to the trackers.

    Args:
        strict: a tracker that fails raises TrackerError: when it starts, else at the next call. Otherwise it is set
            aside with a warning.
        queue_size: calls of ``log`` that may wait for one tracker. With more, the loop waits for the slowest tracker.
        start_timeout: seconds that ``init_trackers`` waits for a tracker to start. A slower one goes on starting while
            the loop runs.
        stall_timeout: seconds without any progress after which a full queue, or one that should be emptied, is given
            up.
        finish_timeout: seconds that the end of the run waits for a tracker to finish, once its queue is empty.

    Raises:
        ConfigurationError: a number that is not positive.
    """

    strict: bool = False
    queue_size: int = 10_000
    start_timeout: float = 30.0
    stall_timeout: float = 30.0
    finish_timeout: float = 60.0

    def __post_init__(self) -> None:
        for name in ("queue_size", "start_timeout", "stall_timeout", "finish_timeout"):
            if not getattr(self, name) > 0:
                raise ConfigurationError(f"{name}={getattr(self, name)!r} is not allowed. Give a number above 0.")


class Channel:
    """Calls the methods of one tracker, one after the other in the order they were given, in a thread of its own.

    The first call that raises, or that hangs when somebody has to wait for it, sets the tracker aside: a warning says
    so once, and nothing reaches it any more. In strict mode the error is raised by the next call of the script instead.

    Args:
        tracker: what to call.
        delivery: sizes and times.

    Attributes:
        waited: seconds that the last wait took, or took since the last progress.
    """

    def __init__(self, tracker: GeneralTracker, delivery: Delivery) -> None:
        self.tracker = tracker
        self.name = str(tracker.name)
        self.error: TrackerError | None = None
        self._raised = False
        self._delivery = delivery
        self._calls: deque[tuple[str, Call]] = deque()
        self._changed = threading.Condition()
        self._hurry = threading.Event()
        self._idle = False
        self._waiting = 0
        self._doing = ""
        self._closing = False
        self._hangs = False
        self._done = 0
        self.waited = 0.0
        self._thread: threading.Thread | None = None
        if getattr(tracker, "background", True):
            # A daemon, so that one that hangs cannot keep the interpreter from ending.
            self._thread = threading.Thread(target=self._run, name=f"accel_track {self.name}", daemon=True)
            self._thread.start()

    # -- the script's side -------------------------------------------------------------------------------------------

    def submit(self, what: str, call: Call) -> None:
        """Have something called after everything given before.

        Args:
            what: the tracker's method, for messages.
            call: what to call.

        Raises:
            TrackerError: in strict mode, if the tracker has failed.
        """
        if self.error is not None:
            self.raise_if_strict()
            return
        if self._thread is None:
            self._do(what, call)
            self.raise_if_strict()
            return
        changed = self._changed
        with changed:
            if len(self._calls) >= self._delivery.queue_size:
                self._wait_for_room()
            self._calls.append((what, call))
            if self._idle:
                self._idle = False
                changed.notify_all()

    def wait(self, timeout: float | None = None, set_aside: bool = True) -> bool:
        """Wait until everything given so far is done.

        Args:
            timeout: seconds in all; left out, it waits as long as there is progress.
            set_aside: whether a tracker that is not done in time is given up.

        Returns:
            Whether it is done.

        Raises:
            TrackerError: in strict mode, if the tracker has failed.
        """
        with self._changed:
            done = self._wait_until(self._is_empty, timeout)
            if not done and set_aside:
                self._give_up(f"no progress for {timeout or self._patience():g} s")
        self.raise_if_strict()
        return done

    def close(self, finish: Call) -> None:
        """Have the tracker finish after everything given so far, also one that was set aside, and let the thread end.

        Args:
            finish: ends the tracker's run.
        """
        if self._thread is None:
            self._do("finish", finish)
            return
        with self._changed:
            self._calls.append(("finish", finish))
            self._closing = True
            self._changed.notify_all()
        self._hurry.set()

    def join(self) -> None:
        """Wait for the end that :meth:`close` asked for: as long as there is progress, and ``finish_timeout`` for the
        last call.

        Raises:
            TrackerError: in strict mode, if the tracker has failed.
        """
        try:
            if self.wait() and self._thread is not None:
                self._thread.join(1.0)
        finally:
            self._hurry.set()

    @property
    def pending(self) -> int:
        """Calls that wait."""
        return len(self._calls)

    def raise_if_strict(self) -> None:
        """Raise the tracker's failure, once, in strict mode."""
        if self._delivery.strict and self.error is not None and not self._raised:
            self._raised = True
            raise self.error

    def _wait_for_room(self) -> None:
        if not self._wait_until(lambda: len(self._calls) < self._delivery.queue_size, None):
            waited = (
                f"{self._delivery.queue_size} calls wait, and there was no progress for "
                f"{self._delivery.stall_timeout:g} s"
            )
            self._give_up(waited)

    def _wait_until(self, condition: Callable[[], bool], timeout: float | None) -> bool:
        """Wait, with the lock held, for a condition; False once the time is over, or nothing has moved for
        ``stall_timeout``.

        The time is that of short naps: while the whole process is stopped (Ctrl-Z, a suspended job), the tracker cannot
        move either.
        """
        waited, done = 0.0, self._done
        self._waiting += 1
        self._hurry.set()
        try:
            while not condition() and not self._hangs:
                if timeout is None and done != self._done:
                    waited, done = 0.0, self._done
                left = (self._patience() if timeout is None else timeout) - waited
                if left <= 0:
                    return condition()
                nap, begin = min(left, _NAP_SECONDS), time.monotonic()
                self._changed.wait(nap)
                waited += min(time.monotonic() - begin, nap)
        finally:
            self.waited = waited
            self._waiting -= 1
            if not self._waiting and not self._closing:
                self._hurry.clear()
        return condition()

    def _patience(self) -> float:
        return self._delivery.finish_timeout if self._doing == "finish" else self._delivery.stall_timeout

    def _is_empty(self) -> bool:
        return not self._calls and not self._doing

    # -- the thread's side -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while self._wait_for_calls():
            while self._take_one():
                pass

    def _wait_for_calls(self) -> bool:
        """Return once there is something to do; False at the end.

        While calls keep coming, nobody has to wake this thread, which would cost the loop more than the rest of its
        call. One busy moment now and then also disturbs the loop less than many: both need the interpreter.
        """
        for _ in range(_ROUNDS):
            self._hurry.wait(_GATHERING_SECONDS)
            if self._calls:
                return True
            if self._closing:
                return False
        with self._changed:
            self._idle = True
            while not self._calls and not self._closing:
                self._changed.wait()
            self._idle = False
            return bool(self._calls)

    def _take_one(self) -> bool:
        with self._changed:
            if not self._calls:
                return False
            what, call = self._calls.popleft()
            self._doing = what
        self._do(what, call)
        with self._changed:
            self._doing = ""
            self._done += 1
            if self._waiting:
                self._changed.notify_all()
        return True

    def _do(self, what: str, call: Call) -> None:
        # What a tracker that was set aside still had to do is dropped, but for letting go of what it holds.
        if self.error is not None and what != "finish":
            return
        try:
            call()
        except BaseException as error:
            if self._thread is None and not isinstance(error, Exception):
                raise  # Ctrl-C in the script's own thread
            with self._changed:
                self._set_aside(error, what)

    def _give_up(self, reason: str) -> None:
        """Wait for the tracker no longer; the lock is held."""
        self._hangs = True
        self._set_aside(TimeoutError(reason), self._doing or "start")

    def _set_aside(self, error: BaseException, what: str) -> None:
        """Have nothing reach the tracker any more, and say so once; the lock is held."""
        self._changed.notify_all()
        if self.error is not None:
            logger.debug("The tracker %r, set aside before, failed in %s(): %s", self.name, what, error, exc_info=error)
            return
        lost = sum(1 for waiting, _ in self._calls if waiting != "finish")
        self._calls = deque(entry for entry in self._calls if entry[0] == "finish")
        self.error = TrackerError(
            f"The tracker {self.name!r} {'hangs' if self._hangs else 'failed'} in {what}() and is set aside: "
            f"{type(error).__name__}: {error}. "
            f"{_consequence(what, lost)}"
        )
        self.error.__cause__ = error
        if not self._delivery.strict:
            details = error if logger.isEnabledFor(logging.DEBUG) else None
            logger.warning("%s The run goes on.", self.error, exc_info=details)


def _consequence(what: str, lost: int) -> str:
    if what == "finish":
        return "What it had not delivered by then may be lost."
    waiting = "No other call waited" if not lost else f"Calls that waited for it and are lost: {lost}"
    return f"{waiting}, and later ones do not reach it."

"""A bounded queue between the training loop and one tracker, emptied by a thread."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from accel_state.errors import ConfigurationError

from .base import GeneralTracker, TrackerError

logger: Final = logging.getLogger(__name__)

Call = Callable[[], Any]
_POLL_SECONDS = 0.05
_POLLS_BEFORE_IDLE = 20
_NAP_SECONDS = 0.1
_OWNER_SECONDS = 1.0


@dataclass(frozen=True)
class Delivery:
    """Settings for delivering values from the training loop to the trackers.

    Args:
        strict: raise TrackerError if a tracker fails: when it starts, or at the next call. Otherwise the tracker is
            disabled with a warning.
        queue_size: calls of ``log`` that may wait for one tracker. When it is full, the loop waits for the tracker.
        start_timeout: seconds that ``init_trackers`` waits for a tracker to start. A slower one keeps starting while
            the loop runs.
        stall_timeout: seconds without progress after which a tracker is disabled, if its queue is full or must be
            emptied.
        finish_timeout: seconds that the end of the run waits for a tracker's ``finish``, once its queue is empty.

    Raises:
        ConfigurationError: a size or timeout is not positive.
    """

    strict: bool = False
    queue_size: int = 10_000
    start_timeout: float = 30.0
    stall_timeout: float = 30.0
    finish_timeout: float = 60.0

    def __post_init__(self) -> None:
        for name in ("queue_size", "start_timeout", "stall_timeout", "finish_timeout"):
            if not getattr(self, name) > 0:
                raise ConfigurationError(f"{name}={getattr(self, name)!r} must be positive.")


class DeliveryQueue:
    """Calls the methods of one tracker in a separate thread, one at a time, in the order of submission.

    The first call that raises, or that hangs while the script waits for it, disables the tracker: a warning is logged
    once, and later calls are dropped. In strict mode the script's next call raises the error instead.

    Args:
        tracker: the tracker.
        delivery: the queue's size and timeouts.
        last_call: returns the tracker's ``finish`` once nothing can submit calls any more, else None. An idle thread
            asks for it every second, so that it ends although the script does not end the run.
    """

    def __init__(
        self, tracker: GeneralTracker, delivery: Delivery, last_call: Callable[[], Call | None] = lambda: None
    ) -> None:
        self.tracker = tracker
        self.name: str = str(tracker.name)
        self.error: TrackerError | None = None  # why the tracker is disabled
        self.waited: float = 0.0  # seconds of the last wait since the last progress
        self._raised = False
        self._delivery = delivery
        self._last_call = last_call
        self._calls: deque[tuple[str, Call]] = deque()
        self._changed = threading.Condition()
        self._urgent = threading.Event()
        self._idle = False
        self._waiting = 0
        self._running = ""
        self._closing = False
        self._hangs = False
        self._done = 0
        self._thread: threading.Thread | None = None
        if getattr(tracker, "background", True):
            # A daemon, so that a hanging tracker cannot keep the interpreter alive.
            self._thread = threading.Thread(target=self._run, name=f"accel_track {self.name}", daemon=True)
            self._thread.start()

    # Called by the script

    def submit(self, method: str, call: Call) -> None:
        """Queue a call of the named method."""
        if self.error is not None:
            self.raise_if_strict()
            return
        if self._thread is None:
            self._execute(method, call)
            self.raise_if_strict()
            return
        changed = self._changed
        with changed:
            size = self._delivery.queue_size
            if len(self._calls) >= size and not self._wait_until(lambda: len(self._calls) < size, None):
                seconds = self._delivery.stall_timeout
                self._give_up(f"{size} calls are queued, and there was no progress for {seconds:g} s")
            self._calls.append((method, call))
            if self._idle:
                self._idle = False
                changed.notify_all()

    def wait(self, timeout: float | None = None, disable: bool = True) -> bool:
        """Wait until all queued calls are done, and return whether they are.

        Without ``timeout`` (seconds), this waits as long as there is progress. With ``disable``, a tracker that is not
        done in time is disabled.
        """
        with self._changed:
            done = self._wait_until(lambda: not self._calls and not self._running, timeout)
            if not done and disable:
                self._give_up(f"no progress for {timeout or self._patience():g} s")
        self.raise_if_strict()
        return done

    def close(self, finish: Call) -> None:
        """Queue the tracker's ``finish``, even for a disabled tracker, and let the thread end after it."""
        if self._thread is None:
            self._execute("finish", finish)
            return
        with self._changed:
            if self._closing:
                return
            self._calls.append(("finish", finish))
            self._closing = True
            self._changed.notify_all()
        self._urgent.set()

    def join(self) -> None:
        """Wait for the end after :meth:`close`: while there is progress, and ``finish_timeout`` for the last call."""
        try:
            if self.wait() and self._thread is not None:
                self._thread.join(1.0)
        finally:
            self._urgent.set()

    @property
    def pending(self) -> int:
        """Number of queued calls."""
        return len(self._calls)

    def raise_if_strict(self) -> None:
        """Raise the tracker's failure, once, in strict mode."""
        if self._delivery.strict and self.error is not None and not self._raised:
            self._raised = True
            raise self.error

    def _wait_until(self, condition: Callable[[], bool], timeout: float | None) -> bool:
        """Wait, with the lock held, until a condition holds; False after ``timeout`` or a stall.

        Time is the sum of short naps, so that it does not pass while the whole process is stopped (Ctrl-Z, a suspended
        job).
        """
        waited, done = 0.0, self._done
        self._waiting += 1
        self._urgent.set()
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
                self._urgent.clear()
        return condition()

    def _patience(self) -> float:
        return self._delivery.finish_timeout if self._running == "finish" else self._delivery.stall_timeout

    # Called by the thread

    def _run(self) -> None:
        while self._wait_for_calls():
            while self._execute_next():
                pass

    def _wait_for_calls(self) -> bool:
        """Return True when there are calls, False at the end.

        The thread polls while calls keep coming, because waking it costs the loop more than the rest of ``submit``.
        Handling calls in batches also interrupts the loop less often, as both need the GIL.
        """
        for _ in range(_POLLS_BEFORE_IDLE):
            self._urgent.wait(_POLL_SECONDS)
            if self._calls:
                return True
            if self._closing:
                return False
        with self._changed:
            self._idle = True
            while not self._calls and not self._closing:
                if not self._changed.wait(_OWNER_SECONDS) and (finish := self._last_call()) is not None:
                    self.close(finish)
            self._idle = False
            return bool(self._calls)

    def _execute_next(self) -> bool:
        with self._changed:
            if not self._calls:
                return False
            method, call = self._calls.popleft()
            self._running = method
        self._execute(method, call)
        with self._changed:
            self._running = ""
            self._done += 1
            if self._waiting:
                self._changed.notify_all()
        return True

    def _execute(self, method: str, call: Call) -> None:
        # A disabled tracker still gets finish(), to release its resources.
        if self.error is not None and method != "finish":
            return
        try:
            call()
        except BaseException as error:
            if self._thread is None and not isinstance(error, Exception):
                raise  # Ctrl-C in the script's thread
            with self._changed:
                self._disable(error, method)

    def _give_up(self, reason: str) -> None:
        """Disable a tracker that hangs; the lock is held."""
        self._hangs = True
        self._disable(TimeoutError(reason), self._running or "start")

    def _disable(self, error: BaseException, method: str) -> None:
        """Drop all calls except ``finish``, now and later, and warn once; the lock is held."""
        self._changed.notify_all()
        if self.error is not None:
            logger.debug("The disabled tracker %r failed in %s(): %s", self.name, method, error, exc_info=error)
            return
        lost = sum(queued != "finish" for queued, _ in self._calls)
        self._calls = deque(entry for entry in self._calls if entry[0] == "finish")
        consequence = f"Queued calls lost: {lost}. Later calls are dropped."
        if method == "finish":
            consequence = "Values not delivered before may be lost."
        self.error = TrackerError(
            f"The tracker {self.name!r} {'hangs' if self._hangs else 'failed'} in {method}() and is disabled: "
            f"{type(error).__name__}: {error}. {consequence}"
        )
        self.error.__cause__ = error
        if not self._delivery.strict:
            details = error if logger.isEnabledFor(logging.DEBUG) else None
            logger.warning("%s The run continues.", self.error, exc_info=details)

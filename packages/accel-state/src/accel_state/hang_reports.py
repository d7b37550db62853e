"""Hang reports: what every rank is doing, once a rank has been in one collective for a minute.

A thread of each rank looks at the stack of the thread that trains, a dozen times in ``--hang_report_seconds``. The
ranks ask and answer through the store of the process group, over a connection of their own. A step does nothing for it.
"""

from __future__ import annotations

import json
import linecache
import logging
import os
import re
import sys
import sysconfig
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from types import FrameType
from typing import ClassVar, Final

import torch.distributed as dist

from . import hang_files
from ._torch_compat import collectives_issued, connect_again
from .collectives.diagnosis import describe_frame, is_internal
from .options.core import CoreOptions

logger: Final = logging.getLogger(__name__)

_LOOKS = 12
_LONGEST_LOOK = 5.0
_CONFIRM_SECONDS, _CONFIRM_PAUSE = 2.0, 0.005
_ANSWER_SECONDS = 5.0  # and two looks, for ranks whose thread is late
_CALL_TIMEOUT = timedelta(seconds=10)

_WRAPPERS = frozenset(("wrapper", "decorate_context", "inner", "wrapped", "__enter__", "__exit__", "_fn"))
_CALLS = frozenset(("__call__", "_wrapped_call_impl", "_call_impl", "forward"))
_COLLECTIVES = ("torch.distributed", "accel_state.collectives", "accel_state.attempts")
_LOADERS = ("accel_data", "torch.utils.data")
# What waits for a device, or for a collective that was started before, without a frame of its own.
_DEVICE_WAIT = re.compile(r"\.(item|tolist|cpu|numpy|wait|synchronize)\(")
_LIBRARIES = tuple({os.path.realpath(sysconfig.get_path(name)) + os.sep for name in ("stdlib", "purelib", "platlib")})


@dataclass(frozen=True)
class Activity:
    """What a rank is doing."""

    call: str  # such as "save_state", "backward", "a data loader"; "user code" if the script itself runs
    place: str  # file:line in function, of the script
    waits: bool  # whether it waits for other ranks, or for a device
    collective: str = ""  # the collective in which it waits, if its name is known
    seconds: float = 0.0  # for how long

    def text(self) -> str:
        """Describe it, without the ranks that it waits for."""
        inside = f" ({self.collective})" if self.collective and self.collective != self.call else ""
        return f"in {self.call}{inside} for {self.seconds:.0f} s, at {self.place}"


def activity_of(frame: FrameType, seconds: float = 0.0) -> Activity:
    """Describe what a thread does, from its innermost frame."""
    stack = [frame]  # from the inside
    while (outer := stack[-1].f_back) is not None:
        stack.append(outer)
    script = next((i for i, one in enumerate(stack) if _is_of_script(one)), None)
    if script is None:
        script = next((i for i, one in enumerate(stack) if not is_internal(one)), len(stack) - 1)
    inside = stack[:script][::-1]
    call = _name(inside)
    if not call:
        caller = next((i for i in range(script + 1, len(stack)) if _is_of_script(stack[i])), script + 1)
        within = _name([one for one in stack[script + 1 : caller][::-1] if is_internal(one)])
        call = f"user code of {within}" if within else "user code"
    names = [one.f_code.co_name for one in inside if _module(one).startswith(_COLLECTIVES)]
    collective = next((name for name in names if not name.startswith("_") and name not in _WRAPPERS), "")
    return Activity(call, describe_frame(stack[script]), _waits(stack), collective, seconds)


def _name(frames: Sequence[FrameType]) -> str:
    """Return what a script calls, from the frames inside its own; empty without frames."""
    frame = next((one for one in frames if one.f_code.co_name not in _WRAPPERS and not _is_helper(one)), None)
    if frame is None:
        return frames[-1].f_code.co_name if frames else ""
    module, name = _module(frame), frame.f_code.co_name
    if module.startswith(_LOADERS):
        return "a data loader"
    if name == "__init__":
        name = getattr(frame.f_code, "co_qualname", name).split(".")[0]  # from Python 3.11 on
    if name in _CALLS and is_internal(frame):
        return "forward"
    if name == "step" and "optim" in module:
        return "optimizer.step"
    return name if is_internal(frame) else f"{module}.{name}"


def _waits(stack: Sequence[FrameType]) -> bool:
    frame = next((one for one in stack if _module(one) != "torch._ops"), stack[0])
    module = _module(frame)
    if module.startswith((*_COLLECTIVES, "torch.nn.parallel.distributed")) or module == "torch.autograd.graph":
        return True
    return _DEVICE_WAIT.search(linecache.getline(frame.f_code.co_filename, frame.f_lineno)) is not None


def _is_of_script(frame: FrameType) -> bool:
    """Return True if a frame is neither of accel, torch, an installed package nor Python."""
    file = frame.f_code.co_filename
    return not (is_internal(frame) or file.startswith("<frozen") or os.path.realpath(file).startswith(_LIBRARIES))


def _is_helper(frame: FrameType) -> bool:
    return _module(frame) in ("contextlib", "functools")


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def report_text(rank: int, activities: Mapping[int, Activity | str], seconds: float) -> str:
    """Build the report.

    Args:
        rank: the rank that has waited for long.
        activities: what each rank is doing, or why that is unknown.
        seconds: the option.
    """
    own = activities[rank]
    assert isinstance(own, Activity)
    lines = [
        f"rank {rank} of {len(activities)} has been in {own.call} for {own.seconds:.0f} s (--hang_report_seconds "
        f"{seconds:g}). What every rank is doing:"
    ]
    texts: dict[str, list[int]] = {}
    for one, activity in sorted(activities.items()):
        texts.setdefault(_line(one, activity, activities), []).append(one)
    lines += [f"  {_ranks(ranks)}: {text}" for text, ranks in texts.items()]
    waiting = [activity for activity in activities.values() if isinstance(activity, Activity) and activity.waits]
    if len(waiting) == len(activities) and len({(one.call, one.place) for one in waiting}) > 1:
        lines.append("The ranks wait in different calls: every rank must make the same calls in the same order.")
    return "\n".join(lines)


def _line(rank: int, activity: Activity | str, activities: Mapping[int, Activity | str]) -> str:
    if isinstance(activity, str):
        return activity
    if not activity.waits:
        return activity.text()
    missing = [other for other, one in activities.items() if not _is_same(one, activity)]
    return f"{activity.text()}; " + (f"waits for {_ranks(missing)}" if missing else "every rank is here")


def _is_same(one: Activity | str, other: Activity) -> bool:
    return isinstance(one, Activity) and (one.call, one.place) == (other.call, other.place)


def _ranks(ranks: Sequence[int]) -> str:
    """Write ranks as text: ``ranks 0-3, 6``."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in spans]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(texts)}"


class HangWatch:
    """Watches the thread that creates it.

    Args:
        rank: of this process.
        world_size: ranks that share the store.
        seconds: how long a rank may be in one collective before all are asked.
        store: shared by the ranks. No other thread may use this connection, because a call into it may block.
    """

    _running: ClassVar[HangWatch | None] = None
    latest: ClassVar[tuple[str, frozenset[int]]] = ("", frozenset())
    """The latest report, and the ranks that wait, by it, or have left."""

    def __init__(self, rank: int, world_size: int, seconds: float, store: dist.Store) -> None:
        self._rank, self._world_size, self._seconds, self._store = rank, world_size, seconds, store
        self._pause = min(seconds / _LOOKS, _LONGEST_LOOK)
        self._pid, self._watched = os.getpid(), threading.get_ident()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="accel-hang-reports", daemon=True)
        self._at: tuple[int, int] = (0, 0)  # the instruction at the last look, and the collectives issued until then
        self._since = time.monotonic()
        self._known: set[tuple[str, str]] = set()  # calls and places that were reported
        self._round = 0  # the last one that was answered
        self._unread = 0  # the round whose report was not read yet, or 0
        self._reported_at = -1  # the collectives issued when the report was written

    @classmethod
    def start(cls, rank: int, world_size: int) -> None:
        """Begin to watch, unless the option is 0."""
        cls.stop()
        seconds = CoreOptions.read("hang_report_seconds")
        if not seconds or world_size == 1:
            return
        store = connect_again(_CALL_TIMEOUT)
        if store is None:
            return
        cls._running = cls(rank, world_size, seconds, dist.PrefixStore("accel/hangs", store))
        cls._running._thread.start()

    @classmethod
    def stop(cls) -> None:
        """End the watch of this process, and leave word that this rank has left."""
        watch, cls._running = cls._running, None
        if watch is not None and watch._pid == os.getpid():
            watch._end.set()
            watch._thread.join()

    def _run(self) -> None:
        try:
            while not self._end.wait(self._pause):
                self._look()
            self._store.set(f"left/{self._rank}", "1")
        except RuntimeError as error:
            # The rank or the launcher that serves the store has ended, and this rank will.
            logger.debug("hang reports end: the store of the process group is unreachable: %s", error)

    def _look(self) -> None:
        frame = sys._current_frames().get(self._watched)
        if frame is None:
            return
        if self._has_moved(frame):
            self._since = time.monotonic()
        held = time.monotonic() - self._since
        if held >= self._seconds and self._is_stuck(activity_of(frame)):
            self._ask()
        del frame
        self._answer()

    def _has_moved(self, frame: FrameType) -> bool:
        """Return True unless the thread is in the same call as before.

        A frame is marked by a flag that only a tracer reads. Later calls have new frames, without it; to keep the frame
        would keep its tensors.
        """
        at = (frame.f_lasti, collectives_issued())
        moved = at != self._at or not frame.f_trace_opcodes
        self._at = at
        if frame.f_trace is None:
            frame.f_trace_opcodes = True
        if self._reported_at not in (-1, at[1]):
            self._withdraw()
        return moved

    def _is_stuck(self, activity: Activity) -> bool:
        """Return True if the thread waits, at a place that was not reported, and also does between two looks."""
        if not activity.waits or (activity.call, activity.place) in self._known:
            return False
        end = time.monotonic() + min(_CONFIRM_SECONDS, self._seconds / 2)
        while time.monotonic() < end:
            time.sleep(_CONFIRM_PAUSE)
            frame = sys._current_frames().get(self._watched)
            if frame is None or self._has_moved(frame):
                self._since = time.monotonic()
                return False
        return True

    def _current(self) -> Activity:
        frame = sys._current_frames()[self._watched]
        return activity_of(frame, time.monotonic() - self._since)

    def _answer(self) -> None:
        """Say what this rank is doing, if another one has asked, and read the report."""
        asked = self._store.add("round", 0)
        if asked > self._round:
            self._publish(asked)
        if self._unread and self._store.check([f"report/{self._unread}"]):
            text, idle = json.loads(self._store.get(f"report/{self._unread}"))
            self._unread = 0
            self._receive(text, idle, printed=True)

    def _publish(self, number: int) -> Activity:
        self._round = self._unread = number
        self._reported_at = self._at[1]
        activity = self._current()
        self._known.add((activity.call, activity.place))
        self._store.set(f"{number}/{self._rank}", json.dumps(asdict(activity)))
        return activity

    def _ask(self) -> None:
        """Ask all ranks, and print what they answer; unless another rank has just asked."""
        number = self._round + 1
        if self._store.add(f"asks/{number}", 1) > 1:
            return
        activities: dict[int, Activity | str] = {self._rank: self._publish(number)}
        self._store.add("round", 1)
        end = time.monotonic() + _ANSWER_SECONDS + 2 * self._pause
        while len(activities) < self._world_size and time.monotonic() < end and not self._end.is_set():
            for rank in range(self._world_size):
                if rank not in activities and (said := self._said(number, rank)):
                    activities[rank] = said
            self._end.wait(_CONFIRM_PAUSE)
        silent = "no answer: it has ended, or native code holds the lock of its interpreter"
        everyone = {rank: activities.get(rank, silent) for rank in range(self._world_size)}
        text = report_text(self._rank, everyone, self._seconds)
        idle = [rank for rank, one in activities.items() if isinstance(one, str) or one.waits]
        self._store.set(f"report/{number}", json.dumps([text, idle]))
        self._unread = 0
        if hang_files.path() is None:
            print(f"accel: {text}", file=sys.stderr, flush=True)
        self._receive(text, idle, printed=False)

    def _receive(self, text: str, idle: Sequence[int], *, printed: bool) -> None:
        HangWatch.latest = text, frozenset(idle)
        if (file := hang_files.path()) is not None:
            hang_files.write(file, text, printed=printed)

    def _said(self, number: int, rank: int) -> Activity | str | None:
        if self._store.check([f"{number}/{rank}"]):
            return Activity(**json.loads(self._store.get(f"{number}/{rank}")))
        if self._store.check([f"left/{rank}"]):
            return "has left the process group: its script has ended, or destroyed it"
        return None

    def _withdraw(self) -> None:
        """Take the report back from the launcher: the ranks went on, and a later error has another cause."""
        self._reported_at = -1
        HangWatch.latest = "", frozenset()
        if (file := hang_files.path()) is not None:
            file.unlink(missing_ok=True)

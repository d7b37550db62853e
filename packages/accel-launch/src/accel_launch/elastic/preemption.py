"""Ranks that save their training when told to end: what they say of it, and the time they are given. Imports no torch."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from accel_state.preemption import Note, read_note

_POLL_SECONDS = 0.05


def notes(folders: Mapping[int, Path]) -> list[Note]:
    """What the ranks of this machine said, as far as they said anything.

    Args:
        folders: where each local rank of the current start reports to.
    """
    return [note for note in map(read_note, folders.values()) if note is not None]


def grace_seconds(folders: Mapping[int, Path], number: int) -> float:
    """How long ranks may take to end after this signal; 0 if none of them saves on it."""
    return max((note.grace_seconds for note in notes(folders) if number in note.signals), default=0.0)


def saved_by_all(folders: Mapping[int, Path]) -> Note | None:
    """What the ranks saved, if all of them did; None otherwise."""
    found = notes(folders)
    return found[0] if found and len(found) == len(folders) and all(note.saved is not None for note in found) else None


def let_save(folders: Mapping[int, Path], number: int) -> None:
    """Hand a signal on to the ranks that save on it, and wait until they have ended or their time is over."""
    waiting = [note.pid for note in notes(folders) if number in note.signals]
    deadline = time.monotonic() + grace_seconds(folders, number)
    send(waiting, number)
    while (waiting := [pid for pid in waiting if _runs(pid)]) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)


def send(pids: Iterable[int], number: int) -> int:
    """Send a signal to processes, and return how many there were."""
    count = 0
    for pid in pids:
        try:
            os.kill(pid, number)
            count += 1
        except ProcessLookupError:
            continue
    return count


def _runs(pid: int) -> bool:
    import psutil

    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def tell(note: Note, what_now: str = "The same command goes on from there.") -> None:
    """Say on the screen that the training was saved."""
    print(
        f"accel launch: told to end, the processes saved the training to {note.saved}. {what_now}",
        file=sys.stderr,
        flush=True,
    )


FORWARDED = tuple(getattr(signal, name) for name in ("SIGUSR1", "SIGUSR2") if hasattr(signal, name))
"""Signals that mean what the ranks make of them; the launcher only hands them on."""

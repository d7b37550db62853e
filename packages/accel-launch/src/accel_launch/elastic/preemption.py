"""Ranks that save on a signal: their notes, and the time they are given. Torch-free."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from accel_state.preemption import Note, read_note

from ..supervisor import send

_POLL_SECONDS = 0.05


def notes(directories: Mapping[int, Path]) -> list[Note]:
    """Return the notes that ranks of this machine have left."""
    return [note for note in map(read_note, directories.values()) if note is not None]


def grace_seconds(directories: Mapping[int, Path], number: int) -> float:
    """Return how long ranks may take to end after this signal; 0 if none of them saves on it."""
    return max((note.grace_seconds for note in notes(directories) if number in note.signals), default=0.0)


def saved_by_all(directories: Mapping[int, Path]) -> Note | None:
    """Return the note of a rank if all ranks have saved on a signal, else None."""
    saved = [note for note in notes(directories) if note.saved is not None]
    return saved[0] if saved and len(saved) == len(directories) else None


def save_and_wait(directories: Mapping[int, Path], number: int, unless: Callable[[], bool] = lambda: False) -> None:
    """Forward a signal to the ranks that save on it, and wait until they have ended or their grace period is over.

    Args:
        directories: of the ranks.
        number: the signal.
        unless: is asked whether to stop waiting.
    """
    waiting = [note.pid for note in notes(directories) if number in note.signals]
    deadline = time.monotonic() + grace_seconds(directories, number)
    send(waiting, number)
    while (waiting := [pid for pid in waiting if _runs(pid)]) and time.monotonic() < deadline and not unless():
        time.sleep(_POLL_SECONDS)


def _runs(pid: int) -> bool:
    import psutil

    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def report_saved(note: Note, next_step: str = "Run the same command again to continue.") -> None:
    """Print that the training was saved on a signal."""
    text = f"accel launch: the training was saved to {note.saved} on a signal. {next_step}"
    print(text.rstrip(), file=sys.stderr, flush=True)

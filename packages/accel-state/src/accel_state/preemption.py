"""What a rank and its launcher tell each other about saving on a signal. Torch-free.

A rank that saves its training on signals says so in a file beside the one that torch's elastic agent has it report
errors to. The launcher then gives it the time it asks for, and takes its exit code for what it is: not a failure, but a
run to be continued.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from .env import read_str

PREEMPTED_EXIT_CODE = 75
"""EX_TEMPFAIL of sysexits.h: a failure that is gone when the same command is run again."""

FILE_NAME = "save_on_signal.json"


@dataclass(frozen=True)
class Note:
    """What a rank has to say.

    Attributes:
        pid: the rank's process.
        signals: numbers of the signals on which it saves.
        grace_seconds: how long that may take.
        exit_code: what it ends with after that.
        saved: the checkpoint, once it has been saved on a signal.
    """

    pid: int
    signals: Sequence[int]
    grace_seconds: float
    exit_code: int = PREEMPTED_EXIT_CODE
    saved: str | None = None


def folder_of_launcher() -> Path | None:
    """Where the launcher looks for this rank's notes; None without a launcher that does."""
    error_file = read_str("TORCHELASTIC_ERROR_FILE")
    return Path(error_file).parent if error_file else None


def leave_note(folder: Path, note: Note) -> None:
    """Write a note, which replaces an earlier one in one go."""
    temporary = folder / f"{FILE_NAME}.tmp"
    temporary.write_text(json.dumps(asdict(note)), encoding="utf-8")
    os.replace(temporary, folder / FILE_NAME)


def take_note_back(folder: Path) -> None:
    """The rank no longer saves on signals."""
    (folder / FILE_NAME).unlink(missing_ok=True)


def read_note(folder: Path) -> Note | None:
    """The note of a rank, or None if it left none."""
    try:
        return Note(**json.loads((folder / FILE_NAME).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None

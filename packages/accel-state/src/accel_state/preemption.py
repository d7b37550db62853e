"""How a rank tells its launcher that it saves a checkpoint on a signal. Torch-free.

The rank writes a file next to its error file of torch's elastic agent. The launcher then grants the requested grace
period, and treats the rank's exit code as a run to be resumed rather than a failure.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from .env import read_str

PREEMPTED_EXIT_CODE = 75
"""EX_TEMPFAIL of sysexits.h: running the same command again may succeed."""

FILE_NAME = "save_on_signal.json"


@dataclass(frozen=True)
class Note:
    """What a rank tells its launcher."""

    pid: int  # process id of the rank
    signals: Sequence[int]  # numbers of the signals on which it saves
    grace_seconds: float  # time limit for saving
    exit_code: int = PREEMPTED_EXIT_CODE  # exit code after saving
    saved: str | None = None  # path of the checkpoint, once saved


def launcher_directory() -> Path | None:
    """Return the directory in which the launcher looks for this rank's note; None without such a launcher."""
    error_file = read_str("TORCHELASTIC_ERROR_FILE")
    return Path(error_file).parent if error_file else None


def write_note(directory: Path, note: Note) -> None:
    """Write a note; an earlier one is replaced atomically."""
    temporary = directory / f"{FILE_NAME}.tmp"
    temporary.write_text(json.dumps(asdict(note)), encoding="utf-8")
    os.replace(temporary, directory / FILE_NAME)


def remove_note(directory: Path) -> None:
    """Remove the note, when the rank no longer saves on signals."""
    (directory / FILE_NAME).unlink(missing_ok=True)


def read_note(directory: Path) -> Note | None:
    """Read the note of a rank; None if there is none."""
    try:
        return Note(**json.loads((directory / FILE_NAME).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None

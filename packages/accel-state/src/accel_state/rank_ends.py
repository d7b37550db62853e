"""How the launcher of a monitored rank adds to the rank's file when both end. Torch-free.

A process cannot write when it has ended. So the rank names its file in a note next to its error file of torch's elastic
agent, and the launcher appends what only it sees: the moments at which the rank and the launcher ended.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from .paths import open_for_writing

FILE_NAME = "monitor.json"


@dataclass(frozen=True)
class RankFile:
    """The file of a monitored rank, one JSON object per line."""

    path: str
    id: str  # of the process, in each of its lines
    began: float  # what "at" counts from, in seconds since the epoch

    def append_end(self, kind: str, time: float) -> None:
        """Append that something ended.

        Args:
            kind: "exit" for the rank, "launcher" for its launcher.
            time: when, in seconds since the epoch.
        """
        line = {"kind": kind, "id": self.id, "at": round(time - self.began, 6)}
        append(Path(self.path), json.dumps(line, separators=(",", ":")).encode() + b"\n")


def append(file: Path, content: bytes) -> None:
    """Append lines to a file that another process may have left in the middle of a line.

    Raises:
        LinkError: the path is a symbolic link.
        OSError: the file cannot be written.
    """
    descriptor = open_for_writing(file, append=True)
    try:
        if os.fstat(descriptor).st_size and not _ends_line(file):
            content = b"\n" + content
        if os.write(descriptor, content) < len(content):
            raise OSError(28, "No space left on device")
    finally:
        os.close(descriptor)


def _ends_line(file: Path) -> bool:
    with file.open("rb") as stream:
        stream.seek(-1, os.SEEK_END)
        return stream.read(1) == b"\n"


def write_note(directory: Path, rank_file: RankFile) -> None:
    """Tell the launcher, which reads the directory, the file of this rank."""
    temporary = directory / f"{FILE_NAME}.tmp"
    temporary.write_text(json.dumps(asdict(rank_file)), encoding="utf-8")
    os.replace(temporary, directory / FILE_NAME)


def read_note(directory: Path) -> RankFile | None:
    """Read the note of a rank; None if it is not monitored."""
    try:
        return RankFile(**json.loads((directory / FILE_NAME).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None

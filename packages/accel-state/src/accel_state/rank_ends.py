"""How the launcher of a monitored rank adds to the rank's file when both end. Torch-free.

A process cannot write when it has ended. So the rank names its file in a note, and the launcher appends what only it
sees: the moments at which the rank and the launcher ended. The note is next to the rank's error file of torch's elastic
agent, and in the directory of a launcher of another kind: of replicas, or one that runs mpirun or srun.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import socket
from dataclasses import asdict, dataclass
from pathlib import Path

from .env import read_str, unset
from .paths import open_for_writing
from .processes import identity, start_time

FILE_NAME = "monitor.json"

VARIABLE = "ACCEL_LAUNCH_ENDS"
"""The launcher of monitored ranks that starts them as replicas, or by another program: a `Launch` as JSON."""


@dataclass(frozen=True)
class Launch:
    """A launcher that a variable of its ranks names; srun starts others between it and them."""

    name: str  # no other launcher has it, on any machine
    began: float  # when it started, in seconds since the epoch
    directory: str  # where it reads the notes of its ranks, on its own machine

    @classmethod
    def of_this_process(cls, directory: Path) -> Launch:
        """Return the launcher that this process is."""
        pid = os.getpid()
        return cls(f"{socket.gethostname()}-{identity(pid)}", start_time(pid) or 0.0, os.fspath(directory))

    def encode(self) -> str:
        """Return the text of the variable, without spaces."""
        return json.dumps(asdict(self), separators=(",", ":"))

    def write_note(self, rank_file: RankFile) -> None:
        """Tell the launcher the file of this rank, instead of that of an earlier process of the rank."""
        if os.path.isdir(self.directory):  # not on another machine
            directory = Path(self.directory, Path(rank_file.path).stem)
            directory.mkdir(exist_ok=True)
            write_note(directory, rank_file)


@functools.cache
def launch() -> Launch | None:
    """Return the launcher that a variable names; None if there is none.

    The variable is removed: what this process starts is not part of that launch.
    """
    text = read_str(VARIABLE)
    unset(VARIABLE)
    with contextlib.suppress(ValueError, TypeError):
        return None if text is None else Launch(**json.loads(text))
    return None


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

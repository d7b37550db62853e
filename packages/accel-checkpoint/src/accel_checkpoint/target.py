"""Where a checkpoint is written to, and read from: a directory, or a place in object storage."""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from accel_state import PartialState
from accel_state.errors import AccelError
from accel_state.storage.url import Location, RemotePath

from .atomic_dir import CheckpointDirectory
from .consensus import on_all_ranks
from .remote.directory import RemoteDirectory, new_save_id
from .remote.reading import RemoteCheckpoint


def agreed_directory(target: Location, process: PartialState) -> CheckpointDirectory | RemoteDirectory:
    """The directory to write to, which is that of the main process. Every rank must call it.

    A path that is made of the time, for example, may differ between ranks.
    """
    url = target.url if isinstance(target, RemotePath) else ""
    chosen = (str(target), url, new_save_id() if url else "")
    if process.num_processes > 1:
        chosen = process.collectives.broadcast_object(chosen)
    path, url, save_id = chosen
    return RemoteDirectory(RemotePath(url), save_id) if url else CheckpointDirectory(path)


class Opened:
    """A checkpoint to read.

    Attributes:
        folder: the directory of its files on this machine.
        remote: where they come from; None for a directory.
    """

    def __init__(self, folder: Path, remote: RemoteCheckpoint | None = None) -> None:
        self.folder, self.remote = folder, remote

    @property
    def absent(self) -> set[str]:
        """The files that are not in the directory, but are read by ranges."""
        return set() if self.remote is None else self.remote.by_ranges

    def source(self, directory: Path) -> Any:
        """What reads the files of a sharded state; None if they are in its directory."""
        if self.remote is None:
            return None
        return self.remote.source(directory.relative_to(self.folder).as_posix())


@contextmanager
def opened(place: Location, process: PartialState, all_files: bool = False) -> Iterator[Opened]:
    """A checkpoint to read. Every rank must enter it, with the same place.

    What is in object storage is copied into a temporary directory by one process of each machine, but for the files of
    sharded tensors, which are read by ranges. The directory is deleted afterwards; errors name the place instead.

    Args:
        place: where it is.
        process: of the run.
        all_files: copy the files of sharded tensors too, for what reads them on its own.
    """
    if not isinstance(place, RemotePath):
        yield Opened(place)
        return
    with tempfile.TemporaryDirectory(prefix="accel-checkpoint-") as own:
        host = socket.gethostname()
        folders = process.collectives.all_gather_object((host, own)) if process.num_processes > 1 else [(host, own)]
        folder = dict(reversed(folders))[host]
        with on_all_ranks(process.collectives, f"reading {place}"):
            checkpoint = RemoteCheckpoint(place)
            if folder == own:
                checkpoint.copy_to(Path(own), all_files)
        try:
            yield Opened(Path(folder), checkpoint)
        except AccelError as error:
            if folder not in str(error):
                raise
            raise type(error)(str(error).replace(folder, str(place))) from error
        if process.num_processes > 1:
            process.collectives.barrier()  # other processes may still read the directory

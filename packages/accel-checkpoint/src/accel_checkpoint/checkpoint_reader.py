"""Reading the files of a checkpoint, which ranks that see the same files verify together."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from accel_state import PartialState
from accel_state.errors import ConfigurationError
from accel_state.storage.url import Location, RemotePath

from .catalog import why_no_checkpoint
from .consensus import Report
from .manifest import Manifest, digest_block, expected_digests, worker_threads
from .names import (
    LOADER_NAME,
    MANIFEST_NAME,
    RNG_PACK,
    RNG_STATE_NAME,
    CheckpointError,
    files_without_manifest,
    is_checkpoint_file,
    require_files,
    rng_file,
)
from .rank_files import RankPack
from .remote.reading import RemoteCheckpoint
from .safe_load import check_sums, read

Identity = tuple[Any, ...]


def identity_of(place: Location, seen: Path | None = None) -> Identity:
    """Return what is equal on processes that see the same files.

    Args:
        place: the checkpoint.
        seen: what to look at instead of its manifest, where this process does not know the checkpoint.
    """
    if isinstance(place, RemotePath):
        return (socket.gethostname(),)  # each machine has one copy
    try:
        status = (seen or place / MANIFEST_NAME).stat()
    except OSError:  # without the file, this process verifies all others
        return socket.gethostname(), os.getpid()
    return socket.gethostname(), status.st_dev, status.st_ino, status.st_mtime_ns


def share_of(rank: int, reports: Sequence[Report]) -> tuple[int, int]:
    """Return which share of the files a rank verifies, of as many as there are ranks that see the same ones.

    Args:
        rank: this rank.
        reports: values with the place of the checkpoint, and the identity of what each rank sees there.
    """
    identities = [report.value[1] for report in reports]
    return identities[:rank].count(identities[rank]), identities.count(identities[rank])


class CheckpointReader:
    """Reads the files of one checkpoint on one rank.

    Args:
        folder: the checkpoint.
        process: of the run.
        rank: whose state is read; by default that of this process.
        remote: the checkpoint in a store of which the folder is a copy.
        share: which share of the files this rank verifies, of how many.

    Attributes:
        manifest: None for a checkpoint of another library.
        names: the files.
        own_file: the file of this rank, or of the rank that a new one starts from.
        new_rank: the rank, if it did not exist when the state was saved.
        read_names: those that were read.
        has_same_ranks: whether as many ranks saved the state, so that each may have what it kept for itself.
        map_location: where tensors are read to.
        load_kwargs: for ``torch.load``.

    Raises:
        ConfigurationError: there is no directory.
        CheckpointError: it is incomplete or damaged.
    """

    def __init__(
        self,
        folder: Path,
        process: PartialState,
        rank: int | None = None,
        remote: RemoteCheckpoint | None = None,
        share: tuple[int, int] = (0, 1),
    ) -> None:
        if not folder.is_dir():
            raise ConfigurationError(str(why_no_checkpoint(folder)))
        self.folder = folder
        self.manifest: Manifest | None = Manifest.read(folder)
        if self.manifest is not None:
            # Other files in the directory are not verified, so they are not read.
            self.names: list[str] = list(self.manifest.files)
        else:
            reason = why_no_checkpoint(folder)
            if reason is not None:
                raise CheckpointError(reason)
            self.names = files_without_manifest(folder)
        self.read_names: set[str] = set()
        self.map_location: Any = "cpu"
        self.load_kwargs: dict[str, Any] | None = None
        self.process = process
        self.rank = process.process_index if rank is None else rank
        self.remote = remote
        self._share = share
        saved = 0 if self.manifest is None else self.manifest.world_size
        self.has_same_ranks: bool = saved == process.num_processes
        self.new_rank: int | None = self.rank if 0 < saved <= self.rank else None
        self._pack = RankPack(folder) if RNG_PACK in self.names else None
        self.rank_names: list[str] = self.names if self._pack is None else self._pack.names
        self.own_file = rng_file(self.rank)
        if self.new_rank is not None:
            # A rank that did not exist when the state was saved reads the file of the lowest one that was saved.
            files = [name for name in self.rank_names if name.startswith(f"{RNG_STATE_NAME}_")]
            self.own_file = min(files, key=number_of, default=rng_file(0))

    @contextmanager
    def verifying(self) -> Iterator[None]:
        """Compare this rank's share of the files with the manifest, while the block reads them.

        Raises:
            CheckpointError: at the end of the block, if a file is damaged.
        """
        own: dict[tuple[Path, int], str] = {}
        digests: dict[tuple[Path, int], str] = {}
        with worker_threads() as submit:
            if self.manifest is not None:
                manifest = self.manifest if self.remote is None else self.remote.copied_files
                first, ranks = self._share
                own = dict(list(expected_digests(manifest, self.folder).items())[first::ranks])
                for path, start in own:
                    submit(partial(digest_block, path, start, digests))
            else:
                for name in sorted(filter(is_checkpoint_file, self.names)):
                    submit(partial(check_sums, self.folder / name))
            yield
        for (path, start), digest in own.items():
            if digests[path, start] != digest:
                where = f" after byte {start}" if start else ""
                raise CheckpointError(
                    f"{path} is damaged: its contents differ from what was written{where}. Choose another checkpoint."
                )

    def read(self, name: str, mapped: bool = False) -> Any:
        """Return the contents of a file in torch's format; see :func:`.safe_load.read`."""
        self.read_names.update((name, RNG_PACK))
        if self._pack is not None and name in self._pack.names:
            return self._pack.read(name, self.load_kwargs)
        if name not in self.names:
            require_files(self.folder, [name], self.names)
        # The states of generators can only be set from host memory.
        location = "cpu" if name.startswith((RNG_STATE_NAME, LOADER_NAME)) else self.map_location
        return read(self.folder / name, location, self.load_kwargs, mapped)


def number_of(name: str) -> int:
    """Return the number of a rank in the name of its file."""
    return int(name.rpartition("_")[2].partition(".")[0])

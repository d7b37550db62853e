"""Writing a state that has been gathered: the same steps for a save that the loop waits for and for one beside it."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from accel_state import get_logger

from .agreement import Agreement, agree
from .checkpoint_folder import CheckpointFolder
from .checkpoint_list import rotate
from .checkpoint_parts import Part
from .checkpoint_writing import write_manifest, write_parts
from .digests import FileRecord

logger = get_logger(__name__)

_RECORDS_NAME = ".records_{}.json"
"""In a folder that is being written: what a rank has written into it. Gone before the checkpoint is in its place."""


@dataclass
class StateWriter:
    """One save on one rank.

    Attributes:
        folder: where to; its partial folder has been made.
        is_writer: whether this process makes the folder whole: the main process (of each node, if nodes save on their own).
        parts: what this rank writes.
        world_size: number of processes.
        counters: for the manifest.
        total_limit: how many automatically named checkpoints to keep; None keeps all.
        closings: called on the writer, with the folder that is being written, when all ranks have written their parts.
        workers: threads for digests; by default as many as there are processors.
        committed: whether the checkpoint is in its place.
    """

    folder: CheckpointFolder
    is_writer: bool
    parts: Sequence[Part]
    world_size: int
    counters: Mapping[str, int]
    total_limit: int | None = None
    closings: Sequence[Callable[[Path], None]] = ()
    workers: int | None = None
    committed: bool = False
    _records: Mapping[str, FileRecord] = field(default_factory=dict)

    def finish(self, agreement: Agreement) -> None:
        """Write the files, put the checkpoint in its place, delete old ones. Every rank must call it.

        Raises:
            CheckpointError: one of these failed on some rank; but for the last of them, what was there before is unchanged.
        """
        target = self.folder.target
        try:
            agree(agreement, f"saving {target}", self._write)
            agree(agreement, f"saving {target}", self._commit)
        except BaseException:
            if self.is_writer:
                self.folder.abandon()
            raise
        self.committed = True
        if self.total_limit is not None:
            agree(agreement, f"deleting old checkpoints beside {target}", self._rotate)

    def _write(self) -> None:
        with self.folder.explaining_write_errors():
            self._records = write_parts(self.folder.partial, self.parts, self.workers)
            if not self.is_writer:
                # Otherwise the writer would have to read what all the others have written.
                path = self.folder.partial / _RECORDS_NAME.format(uuid.uuid4().hex)
                path.write_text(json.dumps({name: asdict(record) for name, record in self._records.items()}))
        self.parts = ()

    def _commit(self) -> None:
        if self.is_writer:
            with self.folder.explaining_write_errors():
                for close in self.closings:
                    close(self.folder.partial)
                records = {**self._records_of_others(), **self._records}
                write_manifest(self.folder.partial, self.world_size, self.counters, records, self.workers)
                self.folder.commit()

    def _records_of_others(self) -> dict[str, FileRecord]:
        """What other ranks have written and brought to the disk, as far as it is still there and of its size."""
        found: dict[str, FileRecord] = {}
        for path in self.folder.partial.glob(_RECORDS_NAME.format("*")):
            for name, record in json.loads(path.read_bytes()).items():
                file = self.folder.partial / name
                if file.is_file() and file.stat().st_size == record["size"]:
                    found[name] = FileRecord(record["size"], tuple(record["digests"]))
            path.unlink()
        return found

    def _rotate(self) -> None:
        target, limit = self.folder.target, self.total_limit
        if self.is_writer and limit is not None:
            deleted = rotate(target.parent, limit, target)
            if deleted:
                logger.info("Deleted %s: total_limit=%d.", ", ".join(path.name for path in deleted), limit)

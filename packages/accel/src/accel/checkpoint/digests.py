"""Digests of files, computed by several threads while the caller goes on. Torch-free.

A file is divided into blocks of 16 MiB with an XXH3 (128 bits) each: so one large file keeps several processors busy,
its first blocks can be digested while the last ones are being written, and a digest that does not match says where the
damage is. XXH3 because it runs at the speed of memory: verifying every byte of a checkpoint then costs less than
reading it. It finds damage, of which it misses one in 2^128; it is no protection against somebody who wants to deceive,
and no digest that lies beside the files could be. ``xxh128sum`` repeats it.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import xxhash

BLOCK_BYTES = 16 << 20
# What is read at a time: it should still be in the processor's cache when it is digested.
_READ_BYTES = 1 << 20
_MOST_WORKERS = 8


@dataclass(frozen=True)
class FileRecord:
    """How a file must look.

    Attributes:
        size: in bytes.
        digests: of its blocks of ``BLOCK_BYTES``, in hexadecimal; an empty file has one, of nothing.
    """

    size: int
    digests: tuple[str, ...]


def block_starts(size: int) -> range:
    """Where the blocks of a file begin."""
    return range(0, max(size, 1), BLOCK_BYTES)


def digest_block(path: str | os.PathLike[str], start: int) -> str:
    """The digest of one block of a file."""
    digest, buffer = xxhash.xxh3_128(), bytearray(_READ_BYTES)
    with open(path, "rb", buffering=0) as file:
        file.seek(start)
        left = BLOCK_BYTES
        while left and (count := file.readinto(memoryview(buffer)[: min(left, _READ_BYTES)])):
            digest.update(memoryview(buffer)[:count])
            left -= count
    return str(digest.hexdigest())


def processors() -> int:
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Workers:
    """Threads that do jobs while the caller goes on. On leaving the block all jobs are done, and the first error is
    raised.

    Args:
        count: how many; by default one a processor, at least 2 (one may be waiting for the disk) and at most 8.
    """

    def __init__(self, count: int | None = None) -> None:
        self._count = min(max(processors(), 2), _MOST_WORKERS) if count is None else count
        self._jobs: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._errors: list[BaseException] = []

    def __enter__(self) -> Workers:
        for _ in range(self._count):
            thread = threading.Thread(target=self._work, name="accel-checkpoint-worker", daemon=True)
            try:
                thread.start()
            except (
                RuntimeError
            ):  # no more threads for this process, as at the end of the interpreter: the caller does the jobs itself
                break
            self._threads.append(thread)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._errors.append(error)
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()
        if error is None and self._errors:
            raise self._errors[0]

    def submit(self, job: Callable[[], object]) -> None:
        """Have a job done. After a first error no job is begun."""
        if self._threads:
            self._jobs.put(job)
        else:
            self._do(job)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._do(job)

    def _do(self, job: Callable[[], object]) -> None:
        if self._errors:
            return
        try:
            job()
        except BaseException as error:
            self._errors.append(error)


class Digests:
    """Digests of files, as far as they have been asked for.

    Args:
        workers: who computes them; the digests are there when their block has been left.
    """

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self._found: dict[tuple[Path, int], str] = {}

    def add_block(self, path: Path, start: int) -> None:
        """Digest one block."""
        self._workers.submit(lambda: self._found.__setitem__((path, start), digest_block(path, start)))

    def add_file(self, path: Path, size: int) -> None:
        """Digest a whole file."""
        for start in block_starts(size):
            self.add_block(path, start)

    def block(self, path: Path, start: int) -> str:
        """The digest of a block that was asked for."""
        return self._found[path, start]

    def record(self, path: Path, size: int) -> FileRecord:
        """The record of a file of which every block has been digested."""
        return FileRecord(size, tuple(self.block(path, start) for start in block_starts(size)))


def record_files(paths: Iterable[Path], count: int | None = None) -> Mapping[Path, FileRecord]:
    """The records of files as they are."""
    sizes = {path: path.stat().st_size for path in paths}
    with Workers(count) as workers:
        digests = Digests(workers)
        for path, size in sizes.items():
            digests.add_file(path, size)
    return {path: digests.record(path, size) for path, size in sizes.items()}

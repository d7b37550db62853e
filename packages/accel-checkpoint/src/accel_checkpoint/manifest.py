"""The manifest of a checkpoint: its files with their sizes and digests, written last. Torch-free.

A file is divided into blocks of 16 MiB with an XXH3 digest (128 bits) each, so that several threads can verify one
large file, and a mismatch says where the damage is. XXH3 runs at the speed of memory, so verifying every byte costs
less than reading it. It detects damage (it misses one corruption in 2^128) but not tampering. ``xxh128sum`` computes
the same digests.
"""

from __future__ import annotations

import json
import os
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import xxhash

from accel_state.paths import leads_outside

from .names import MANIFEST_NAME, CheckpointError, require_files, require_number

MANIFEST_FORMAT = 1
BLOCK_BYTES = 16 << 20
# Read size: small enough to be in the processor's cache still when it is hashed.
_READ_BYTES = 1 << 20
_MAX_WORKERS = 8


@dataclass(frozen=True)
class FileRecord:
    """Size and digests of a file."""

    size: int  # in bytes
    digests: tuple[str, ...]  # hexadecimal digest of each block of ``BLOCK_BYTES``; an empty file has one, of no bytes


@dataclass(frozen=True)
class Manifest:
    """The contents of a manifest."""

    format: int  # version of the format
    world_size: int  # number of processes that saved the checkpoint
    # ``iteration``, the number of the next checkpoint; ``step``, the micro batches in the open accumulation window; and
    # ``optimizer_steps``, the steps taken by the first optimizer
    counters: Mapping[str, int]
    versions: Mapping[str, str]  # of accel, torch, numpy and python
    saved_at: str  # time of the save, UTC, ISO 8601
    files: Mapping[str, FileRecord]  # relative POSIX path to record
    prefix: str = ""  # in object storage: what is in front of the files' names

    @classmethod
    def read(cls, directory: Path) -> Manifest | None:
        """Read the manifest of a checkpoint; None if there is none, as in checkpoints of other libraries."""
        path = directory / MANIFEST_NAME
        if leads_outside(directory, MANIFEST_NAME):
            raise CheckpointError(f"{path} is a link that leads outside of the checkpoint. It is not loaded.")
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise CheckpointError(
                f"{path} is damaged: {type(error).__name__}: {error}. Choose another checkpoint."
            ) from error
        manifest = cls.parse(content, str(path))
        for name in manifest.files:
            if leads_outside(directory, name):
                raise CheckpointError(f"{path} names a file outside of the checkpoint: {name}. It is not loaded.")
        return manifest

    @classmethod
    def parse(cls, content: bytes, path: str) -> Manifest:
        """Return the manifest in the bytes of its file.

        Args:
            content: the bytes.
            path: the file, for messages.

        Raises:
            CheckpointError: it is damaged, or of another version.
        """
        try:
            text = content.decode("ascii")
            raw = json.loads(text)
            files = {}
            for name, record in raw["files"].items():
                size = require_number(record["size"], f"{path}: the size of {name}")
                files[str(name)] = FileRecord(size, tuple(map(str, record["digests"])))
            for name, value in raw["counters"].items():
                require_number(value, f"{path}: {name}")
            manifest = cls(
                format=int(raw["format"]),
                world_size=require_number(raw["world_size"], f"{path}: world_size", minimum=1),
                counters=dict(raw["counters"]),
                versions=dict(raw["versions"]),
                saved_at=str(raw["saved_at"]),
                files=files,
                prefix=str(raw.get("prefix", "")),
            )
            if "iteration" not in manifest.counters:
                raise KeyError("iteration")
            for name in (manifest.prefix, *files):
                if name.startswith("/") or ".." in name.split("/"):
                    raise ValueError(f"it names a file outside of the checkpoint: {name}")
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise CheckpointError(
                f"{path} is damaged: {type(error).__name__}: {error}. Choose another checkpoint."
            ) from error
        if manifest.format != MANIFEST_FORMAT:
            raise CheckpointError(
                f"{path} has format {manifest.format}, and this version of accel reads {MANIFEST_FORMAT}. It was saved "
                f"with accel-checkpoint {manifest.versions.get('accel-checkpoint')}: load it with that version."
            )
        # The manifest's own digest detects damage that is still valid JSON, such as a changed number.
        if text != manifest.text():
            raise CheckpointError(f"{path} is damaged: its digest does not match. Choose another checkpoint.")
        return manifest

    def text(self) -> str:
        """Return the manifest as JSON; its last entry is the digest of the rest."""
        content = {**asdict(self), "digest": "xxh3_128", "block_bytes": BLOCK_BYTES}
        if not self.prefix:
            del content["prefix"]
        own_digest = xxhash.xxh3_128(json.dumps(content).encode("ascii")).hexdigest()
        return json.dumps({**content, "own_digest": own_digest}, indent=1) + "\n"

    def differing_sizes(self, directory: Path) -> list[str]:
        paths = {name: directory / name for name in self.files}
        return [
            name for name, path in paths.items() if not path.is_file() or path.stat().st_size != self.files[name].size
        ]


def digest_block(path: Path, start: int, digests: dict[tuple[Path, int], str]) -> None:
    """Note the digest of the block of a file that begins at ``start``."""
    digest, buffer = xxhash.xxh3_128(), memoryview(bytearray(_READ_BYTES))
    with open(path, "rb", buffering=0) as file:
        file.seek(start)
        left = BLOCK_BYTES
        while left and (count := file.readinto(buffer[: min(left, _READ_BYTES)])):
            digest.update(buffer[:count])
            left -= count
    digests[path, start] = digest.hexdigest()


def record_file(path: Path) -> FileRecord:
    """Return the record of a file as it is on the disk."""
    size = path.stat().st_size
    digests: dict[tuple[Path, int], str] = {}
    for start in range(0, max(size, 1), BLOCK_BYTES):
        digest_block(path, start, digests)
    return FileRecord(size, tuple(digests.values()))


Submit = Callable[[Callable[[], object]], None]
"""Has a job run by one of :func:`worker_threads`."""


@contextmanager
def worker_threads(count: int | None = None) -> Iterator[Submit]:
    """Run jobs in threads while the block continues; it ends when they are done.

    After the first error no further job is started, and the end of the block raises it.

    Args:
        count: number of threads; by default one for each processor. With none, jobs run at the end of the block.
    """
    if count is None:
        processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        count = min(max(processors, 2), _MAX_WORKERS)
    jobs: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
    threads: list[threading.Thread] = []
    errors: list[BaseException] = []

    def work() -> None:
        while (job := jobs.get()) is not None:
            try:
                if not errors:
                    job()
            except BaseException as error:
                errors.append(error)

    for _ in range(count):
        thread = threading.Thread(target=work, name="accel-checkpoint-worker", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the interpreter is shutting down: the caller runs the jobs
            break
        threads.append(thread)
    try:
        yield jobs.put
    except BaseException as error:
        errors.append(error)
        raise
    finally:
        for _ in (*threads, None):
            jobs.put(None)
        work()  # helps with what is left
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]


def expected_digests(manifest: Manifest, directory: Path) -> dict[tuple[Path, int], str]:
    """Return the digest that each block of the files should have, by path and the block's first byte.

    Raises:
        CheckpointError: files are missing, or have other sizes.
    """
    require_files(directory, manifest.files)
    expected = {}
    for name, record in manifest.files.items():
        path = directory / name
        size = path.stat().st_size
        if size != record.size or len(record.digests) != len(range(0, max(size, 1), BLOCK_BYTES)):
            raise CheckpointError(
                f"{path} is damaged: it has {size} bytes instead of {record.size}. Choose another checkpoint."
            )
        for index, digest in enumerate(record.digests):
            expected[path, index * BLOCK_BYTES] = digest
    return expected


def damaged_files(manifest: Manifest, directory: Path) -> dict[str, str]:
    """Return every file that is not as it was written, with what is wrong."""
    problems = {}
    for name in manifest.differing_sizes(directory):
        problems[name] = "has another size" if (directory / name).is_file() else "missing"
    changed: list[str] = []

    def compare(name: str, record: FileRecord) -> None:
        if record_file(directory / name) != record:
            changed.append(name)

    with worker_threads() as submit:
        for name, record in manifest.files.items():
            if name not in problems:
                submit(partial(compare, name, record))
    return {**problems, **dict.fromkeys(sorted(changed), "contents differ from what was written")}

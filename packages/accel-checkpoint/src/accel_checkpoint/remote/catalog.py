"""The checkpoints in a place of a store: listing, deleting, cleaning."""

from __future__ import annotations

import tempfile
from pathlib import Path

from accel_state.storage.store import Store
from accel_state.storage.url import RemotePath

from ..manifest import Manifest, record_file
from ..names import MANIFEST_NAME, NUMBERED, CheckpointError
from .directory import PREFIX, clean, differing


def read_manifest(place: RemotePath) -> Manifest | None:
    """Return the manifest of a checkpoint; None if there is no checkpoint."""
    content = Store(place).read(MANIFEST_NAME)
    return None if content is None else Manifest.parse(content, f"{place}/{MANIFEST_NAME}")


def examine(place: RemotePath) -> tuple[Manifest | None, str]:
    """Return the manifest of a checkpoint, and why it is not complete, or ""."""
    try:
        manifest = read_manifest(place)
    except CheckpointError as error:
        return None, str(error)
    if manifest is None:
        return None, "was never finished"
    problems = differing(Store(place), manifest.prefix, manifest)
    return manifest, f"missing or of another size: {', '.join(problems)}" if problems else ""


def verified(place: RemotePath) -> tuple[int, dict[str, str]]:
    """Return the number of files of a checkpoint, and by file what is wrong with it.

    One file at a time is on this machine.
    """
    manifest = read_manifest(place)
    if manifest is None:
        raise CheckpointError(f"{place}/{MANIFEST_NAME} is missing: there is no complete checkpoint.")
    store = Store(place)
    problems = differing(store, manifest.prefix, manifest)
    with tempfile.TemporaryDirectory(prefix="accel-verify-") as folder:
        for name, record in manifest.files.items():
            if name in problems:
                continue
            copy = Path(folder, "file")
            store.download([(f"{manifest.prefix}/{name}", copy)])
            if record_file(copy) != record:
                problems[name] = "contents differ from what was written"
    return len(manifest.files), problems


def places(directory: RemotePath) -> list[RemotePath]:
    """Return what looks like a checkpoint in a place, and in ``checkpoints`` in it."""
    found = []
    for parent in (directory, directory / "checkpoints"):
        for name in Store(parent).names():
            if not name.startswith(PREFIX) and _is_place(Store(parent / name)):
                found.append(parent / name)
    return found


def _is_place(store: Store) -> bool:
    """Return True if there is a checkpoint, or what is left of one; some stores show empty directories for a while."""
    inside = store.names()
    return MANIFEST_NAME in inside or any(name.startswith(PREFIX) and store.files(name) for name in inside)


def numbered(directory: RemotePath) -> dict[int, RemotePath]:
    """Return what is named like an automatically named checkpoint, by number, in ascending order."""
    numbers = {}
    for name in Store(directory).names():
        if match := NUMBERED.fullmatch(name):
            numbers[int(match[1])] = directory / name
    return dict(sorted(numbers.items()))


def delete(place: RemotePath) -> None:
    """Delete a checkpoint: first the marker, so that what is left of an interrupted deletion is no checkpoint."""
    store = Store(place)
    marker = store.read(MANIFEST_NAME)
    store.delete(MANIFEST_NAME)
    clean(store, None, replaced=marker)
    store.remove_directory()


def rotate(directory: RemotePath, total_limit: int, newest: RemotePath) -> list[RemotePath]:
    """Delete the checkpoints with the lowest numbers until ``total_limit`` are left, but never the newest."""
    old: list[RemotePath] = []
    unfinished: list[RemotePath] = []
    for path in numbered(directory).values():
        if path != newest:
            is_marked = MANIFEST_NAME in Store(path).names()
            (old if is_marked else unfinished).append(path)
    surplus = old[: max(0, len(old) + 1 - max(total_limit, 1))]
    for path in surplus:
        delete(path)
    for path in unfinished:
        clean(Store(path), None)
    return surplus


def clean_all(directory: RemotePath) -> int:
    """Delete what killed processes have left in a place, which may be a checkpoint itself; returns how much."""
    return sum(clean(Store(place), Store(place).read(MANIFEST_NAME)) for place in [directory, *places(directory)])

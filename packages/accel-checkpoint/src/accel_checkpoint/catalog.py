"""The checkpoints in a directory: listing them, finding the newest complete one, deleting old ones. Torch-free."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import ModuleType
from typing import Any

from accel_state.arguments import check_number
from accel_state.errors import ConfigurationError
from accel_state.paths import as_location
from accel_state.storage.url import Location, RemotePath

from .atomic_dir import DELETED, PARTIAL, aside, delete, name_of, recover_all, remove_leftovers
from .manifest import Manifest, damaged_files
from .names import MANIFEST_NAME, NUMBERED, CheckpointError, is_checkpoint_file, rng_file

_UNFINISHED = "was never finished"


@dataclass(frozen=True)
class CheckpointInfo:
    """A checkpoint, without the contents of its files."""

    path: Location  # its directory
    complete: bool  # whether every file exists with its size
    problem: str  # why it is not complete, else ""
    size: int  # of all files, in bytes
    saved: float  # time of the save, in seconds since the epoch
    optimizer_steps: int | None  # number of optimizer steps taken; None if unknown
    world_size: int | None  # number of processes that saved it; None if unknown

    @property
    def unfinished(self) -> bool:
        """True if it is what a killed process has left of a save, which never was a checkpoint."""
        return self.problem == _UNFINISHED

    @classmethod
    def of(cls, directory: Location) -> CheckpointInfo:
        manifest, problem = _examine(directory)
        if isinstance(directory, RemotePath):
            saved = 0.0
            size = sum(record.size for record in manifest.files.values()) if manifest else 0
        else:
            saved = directory.stat().st_mtime
            size = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
        with suppress(ValueError):  # a later version of accel may write the time in another form
            if manifest is not None:
                saved = datetime.fromisoformat(manifest.saved_at).timestamp()
        return cls(
            path=directory,
            complete=not problem,
            problem=problem,
            size=size,
            saved=saved,
            optimizer_steps=manifest.counters.get("optimizer_steps") if manifest else None,
            world_size=manifest.world_size if manifest else None,
        )


def remote() -> ModuleType:
    """Return the same for places in object storage, imported when one is used."""
    from .remote import catalog

    return catalog


def _examine(directory: Location) -> tuple[Manifest | None, str]:
    if isinstance(directory, RemotePath):
        return remote().examine(directory)
    if name_of(directory, PARTIAL):
        return None, _UNFINISHED
    try:
        manifest = Manifest.read(directory)
    except CheckpointError as error:
        return None, str(error)
    if manifest is None:
        return None, "" if _is_of_another_library(directory) else "has no manifest, or lacks files"
    differing = manifest.differing_sizes(directory)
    return manifest, f"missing or of another size: {', '.join(differing)}" if differing else ""


def _is_of_another_library(directory: Path) -> bool:
    """Return True if a directory without a manifest is another library's checkpoint, not one of accel that lost it."""
    if not (directory / rng_file(0)).is_file():
        return False
    # Imported only here: reading the file needs torch.
    from .safe_load import was_saved_with_manifest

    return not was_saved_with_manifest(directory / rng_file(0))


def numbered_checkpoints(directory: Location) -> dict[int, Any]:
    """Return the automatically named checkpoints in a directory by number, in ascending order."""
    if isinstance(directory, RemotePath):
        return remote().numbered(directory)
    numbers = {}
    for entry in directory.iterdir() if directory.is_dir() else ():
        match = NUMBERED.fullmatch(entry.name)
        if match and entry.is_dir():
            numbers[int(match[1])] = entry
    return dict(sorted(numbers.items()))


def is_complete(directory: Location) -> bool:
    """Return True if a checkpoint is complete, without reading its files.

    One without a manifest is complete if it has generators.
    """
    return not _examine(directory)[1]


def list_checkpoints(directory: str | os.PathLike[str]) -> list[CheckpointInfo]:
    """Return every checkpoint in a directory, including unfinished ones, the oldest first."""
    place = as_location("directory", directory)
    if isinstance(place, RemotePath):
        return sorted(map(CheckpointInfo.of, remote().places(place)), key=_age_order)
    infos = []
    for parent in (place, place / "checkpoints"):
        for entry in sorted(parent.iterdir()) if parent.is_dir() else ():
            if entry.is_dir() and _looks_like_checkpoint(entry):
                infos.append(CheckpointInfo.of(entry))
    return sorted(infos, key=_age_order)


def why_no_checkpoint(directory: Location) -> str | None:
    """Why a path is not a checkpoint, with the next step; None if it looks like one."""
    if isinstance(directory, RemotePath):
        if remote().read_manifest(directory) is not None:
            return None
        names = [info.path.name for info in list_checkpoints(directory)]
        if names:
            return f"{directory} is not a checkpoint but contains some: {', '.join(names)}. Give one of them."
        return f"{directory} is not a checkpoint: it has no {MANIFEST_NAME}. Give the URL that save_state returned."
    if directory.is_dir():
        if (directory / MANIFEST_NAME).exists() or _looks_like_checkpoint(directory):
            return None
        names = [info.path.name for info in list_checkpoints(directory)]
        if names:
            return f"{directory.resolve()} is not a checkpoint but contains some: {', '.join(names)}. Give one of them."
        return (
            f"{directory.resolve()} is not a checkpoint: it has no {MANIFEST_NAME}, and no file that save_state writes."
            " Give the path that save_state returned."
        )
    if directory.exists():
        return f"{directory} is a file. Give the directory that save_state returned."
    return f"{directory} does not exist (looked in {Path.cwd()}). Give the path that save_state returned."


def _age_order(info: CheckpointInfo) -> tuple[float, int]:
    match = NUMBERED.fullmatch(info.path.name)
    return info.saved, int(match[1]) if match else 0


def _looks_like_checkpoint(directory: Path) -> bool:
    # Of hidden directories, only those that a killed process has left.
    if directory.name.startswith("."):
        return name_of(directory, PARTIAL) is not None
    return NUMBERED.fullmatch(directory.name) is not None or any(map(is_checkpoint_file, os.listdir(directory)))


def newest_complete(directory: str | os.PathLike[str]) -> Location:
    """Return the complete automatically named checkpoint with the highest number."""
    checkpoints = numbered_checkpoints(as_location("directory", directory))
    path: Location
    for path in reversed(checkpoints.values()):
        if is_complete(path):
            return path
    present = "no checkpoint_<number>"
    if checkpoints:
        present = f"only incomplete ones ({', '.join(path.name for path in checkpoints.values())})"
    raise ConfigurationError(
        f"there is no state to load in {directory}: it has {present}. Save one first, or give load_state its path."
    )


def newest_saved(directory: Location) -> Location:
    """Return the complete checkpoint, of any name, that was saved last."""
    if isinstance(directory, RemotePath) or directory.is_dir():
        if not isinstance(directory, RemotePath):
            recover_all(directory)
        for info in reversed(list_checkpoints(directory)):
            if info.complete:
                return info.path
    raise ConfigurationError(
        f"there is no state to load in {directory}: no directory in it is a complete checkpoint. Give load_state its "
        "path."
    )


def check_keep(keep: int | None) -> None:
    """Raise ConfigurationError if this is not how many checkpoints to keep."""
    if keep is not None:
        check_number("keep", keep, at_least=1, whole=True)


def rotate(
    directory: Location, total_limit: int, newest: Location, needed: Collection[Location] = ()
) -> Sequence[Location]:
    """Delete the checkpoints with the lowest numbers until ``total_limit`` are left, but no newest or needed.

    A checkpoint that is a link to another place was put there by the user: it is neither counted nor deleted.
    """
    if isinstance(directory, RemotePath):
        return remote().rotate(directory, total_limit, newest)
    old = [path for path in numbered_checkpoints(directory).values() if path != newest and not path.is_symlink()]
    surplus = [path for path in old[: max(0, len(old) + 1 - max(total_limit, 1))] if path not in needed]
    for path in surplus:
        delete(path, aside(path, DELETED))
    remove_leftovers(directory)
    return surplus


def verify(path: str | os.PathLike[str]) -> dict[str, str]:
    """Compare every file of a checkpoint with its digest.

    Args:
        path: the checkpoint, also as a URL, whose files are fetched one after the other.

    Returns:
        By file, what is wrong with it; empty if all files are as they were written.

    Raises:
        CheckpointError: there is no manifest, or it is damaged.
    """
    return verified(as_location("path", path))[1]


def verified(place: Location) -> tuple[int, dict[str, str]]:
    """Return the number of files of a checkpoint, and what :func:`verify` returns."""
    if isinstance(place, RemotePath):
        found: tuple[int, dict[str, str]] = remote().verified(place)
        return found
    manifest = Manifest.read(place)
    if manifest is None:
        raise CheckpointError(
            f"{place / MANIFEST_NAME} is missing: the checkpoint is incomplete or was saved by another library, so it "
            "cannot be verified."
        )
    return len(manifest.files), damaged_files(manifest, place)

"""The checkpoints in a folder: which is the newest that is whole, which are old, and what to tell of each. Torch-free."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from accel_state.errors import ConfigurationError

from .atomic_dir import DELETED, PARTIAL, aside, delete, name_of, recover_all, remove_leftovers
from .manifest import Manifest
from .names import CheckpointError, is_file_of_a_state, rng_file

_NUMBERED = re.compile(r"checkpoint_([0-9]+)")


@dataclass(frozen=True)
class CheckpointInfo:
    """What there is to tell of a checkpoint without reading its contents.

    Attributes:
        path: its folder.
        complete: whether every file is there with its size.
        problem: what is wrong where it is not complete, else "".
        size: of all files, in bytes.
        saved: when, in seconds since the epoch.
        optimizer_steps: how often the optimizer had stepped; None if it does not say.
        world_size: how many processes saved it; None if it does not say.
    """

    path: Path
    complete: bool
    problem: str
    size: int
    saved: float
    optimizer_steps: int | None
    world_size: int | None

    @classmethod
    def of(cls, folder: Path) -> CheckpointInfo:
        """Look at a checkpoint."""
        manifest, problem = _examine(folder)
        files = [path for path in folder.rglob("*") if path.is_file()]
        return cls(
            path=folder,
            complete=not problem,
            problem=problem,
            size=sum(path.stat().st_size for path in files),
            saved=_time_of(folder, manifest),
            optimizer_steps=manifest.counters.get("optimizer_steps") if manifest else None,
            world_size=manifest.world_size if manifest else None,
        )


def _examine(folder: Path) -> tuple[Manifest | None, str]:
    if name_of(folder, PARTIAL):
        return None, "was never finished"
    try:
        manifest = Manifest.read(folder)
    except CheckpointError as error:
        return None, str(error)
    if manifest is None:
        return None, "" if _is_of_another_library(folder) else "has no manifest, or lacks files"
    differing = manifest.differing_sizes(folder)
    return manifest, f"missing or of another size: {', '.join(differing)}" if differing else ""


def _is_of_another_library(folder: Path) -> bool:
    """Whether a folder without a manifest is whole as other libraries have it, rather than one of ours that lost it."""
    if not (folder / rng_file(0)).is_file():
        return False
    # Only now: reading the file needs torch.
    from .safe_load import was_saved_with_manifest

    return not was_saved_with_manifest(folder / rng_file(0))


def _time_of(folder: Path, manifest: Manifest | None) -> float:
    from datetime import datetime

    # A later version may write the time in another form.
    with suppress(ValueError):
        if manifest is not None:
            return datetime.fromisoformat(manifest.saved_at).timestamp()
    return folder.stat().st_mtime


def numbered_checkpoints(folder: Path) -> dict[int, Path]:
    """The automatically named checkpoints in a folder by number, in ascending order."""
    entries = folder.iterdir() if folder.is_dir() else []
    found = {int(match[1]): entry for entry in entries if (match := _NUMBERED.fullmatch(entry.name)) and entry.is_dir()}
    return dict(sorted(found.items()))


def checkpoint_number(folder: Path) -> int | None:
    """The number in an automatic name, or None."""
    match = _NUMBERED.fullmatch(folder.name)
    return int(match[1]) if match else None


def is_complete(folder: Path) -> bool:
    """Whether a checkpoint is whole, as far as can be seen without reading its files; without a manifest, whether it
    has generators.
    """
    return not _examine(folder)[1]


def list_checkpoints(folder: Path) -> list[CheckpointInfo]:
    """Every checkpoint in a folder, also those that were never finished, the oldest first.

    Args:
        folder: a folder of checkpoints, or one that has them in its folder ``checkpoints``.
    """
    inner = folder / "checkpoints"
    places = [folder, inner] if inner.is_dir() else [folder]
    found = [
        CheckpointInfo.of(entry) for place in places for entry in sorted(place.iterdir()) if _looks_like_one(entry)
    ]
    return sorted(found, key=lambda info: (info.saved, checkpoint_number(info.path) or 0))


def _looks_like_one(entry: Path) -> bool:
    if not entry.is_dir():
        return False
    # Of names that begin with a dot, only those of folders that a killed process has left.
    if entry.name.startswith("."):
        return name_of(entry, PARTIAL) is not None
    return _NUMBERED.fullmatch(entry.name) is not None or any(is_file_of_a_state(name) for name in os.listdir(entry))


def newest_complete(folder: Path) -> Path:
    """The automatically named checkpoint with the highest number that is whole.

    Raises:
        ConfigurationError: there is none.
    """
    found = numbered_checkpoints(folder)
    for path in reversed(found.values()):
        if is_complete(path):
            return path
    seen = (
        f"only incomplete ones ({', '.join(path.name for path in found.values())})"
        if found
        else "no checkpoint_<number>"
    )
    raise ConfigurationError(
        f"there is no state to load in {folder}: it has {seen}. Save one first, or give load_state its path."
    )


def newest_saved(folder: Path) -> Path:
    """The checkpoint, of any name, that was saved last and is whole.

    Raises:
        ConfigurationError: there is none.
    """
    if folder.is_dir():
        recover_all(folder)
        for info in reversed(list_checkpoints(folder)):
            if info.complete:
                return info.path
    raise ConfigurationError(
        f"there is no state to load in {folder}: no folder in it is a complete checkpoint. Give load_state its path."
    )


def rotate(folder: Path, total_limit: int, newest: Path) -> list[Path]:
    """Delete the checkpoints with the lowest numbers until ``total_limit`` are left, but never the newest.

    Returns:
        Those that were deleted.
    """
    old = [path for path in numbered_checkpoints(folder).values() if path != newest]
    surplus = old[: max(0, len(old) + 1 - max(total_limit, 1))]
    for path in surplus:
        delete(path, aside(path, DELETED))
    remove_leftovers(folder)
    return surplus

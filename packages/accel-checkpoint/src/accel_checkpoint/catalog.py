"""The checkpoints in a directory: listing them, finding the newest complete one, deleting old ones. Torch-free."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from accel_state.errors import ConfigurationError

from .atomic_dir import DELETED, PARTIAL, aside, delete, name_of, recover_all, remove_leftovers
from .manifest import Manifest
from .names import MANIFEST_NAME, NUMBERED, CheckpointError, is_checkpoint_file, rng_file


@dataclass(frozen=True)
class CheckpointInfo:
    """A checkpoint, without the contents of its files."""

    path: Path  # its directory
    complete: bool  # whether every file exists with its size
    problem: str  # why it is not complete, else ""
    size: int  # of all files, in bytes
    saved: float  # time of the save, in seconds since the epoch
    optimizer_steps: int | None  # number of optimizer steps taken; None if unknown
    world_size: int | None  # number of processes that saved it; None if unknown

    @classmethod
    def of(cls, directory: Path) -> CheckpointInfo:
        manifest, problem = _examine(directory)
        saved = directory.stat().st_mtime
        with suppress(ValueError):  # a later version of accel may write the time in another form
            if manifest is not None:
                saved = datetime.fromisoformat(manifest.saved_at).timestamp()
        return cls(
            path=directory,
            complete=not problem,
            problem=problem,
            size=sum(path.stat().st_size for path in directory.rglob("*") if path.is_file()),
            saved=saved,
            optimizer_steps=manifest.counters.get("optimizer_steps") if manifest else None,
            world_size=manifest.world_size if manifest else None,
        )


def _examine(directory: Path) -> tuple[Manifest | None, str]:
    if name_of(directory, PARTIAL):
        return None, "was never finished"
    try:
        manifest = Manifest.read(directory)
    except CheckpointError as error:
        return None, str(error)
    if manifest is None:
        return None, "" if _is_of_another_library(directory) else "has no manifest, or lacks files"
    differing = manifest.differing_sizes(directory)
    return manifest, f"missing or of another size: {', '.join(differing)}" if differing else ""


def _is_of_another_library(directory: Path) -> bool:
    """Whether a directory without a manifest is a checkpoint of another library, not one of accel that lost it."""
    if not (directory / rng_file(0)).is_file():
        return False
    # Imported only here: reading the file needs torch.
    from .safe_load import was_saved_with_manifest

    return not was_saved_with_manifest(directory / rng_file(0))


def numbered_checkpoints(directory: Path) -> dict[int, Path]:
    """The automatically named checkpoints in a directory by number, in ascending order."""
    numbers = {}
    for entry in directory.iterdir() if directory.is_dir() else ():
        match = NUMBERED.fullmatch(entry.name)
        if match and entry.is_dir():
            numbers[int(match[1])] = entry
    return dict(sorted(numbers.items()))


def is_complete(directory: Path) -> bool:
    """Whether a checkpoint is complete, without reading its files; without a manifest, whether it has generators."""
    return not _examine(directory)[1]


def list_checkpoints(directory: str | os.PathLike[str]) -> list[CheckpointInfo]:
    """Every checkpoint in a directory, including unfinished ones, the oldest first."""
    infos = []
    for parent in (Path(directory), Path(directory) / "checkpoints"):
        for entry in sorted(parent.iterdir()) if parent.is_dir() else ():
            if entry.is_dir() and _looks_like_checkpoint(entry):
                infos.append(CheckpointInfo.of(entry))
    return sorted(infos, key=_age_order)


def why_no_checkpoint(directory: Path) -> str | None:
    """Why a path is not a checkpoint, with the next step; None if it looks like one."""
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


def newest_complete(directory: str | os.PathLike[str]) -> Path:
    """The complete automatically named checkpoint with the highest number."""
    checkpoints = numbered_checkpoints(Path(directory))
    for path in reversed(checkpoints.values()):
        if is_complete(path):
            return path
    present = "no checkpoint_<number>"
    if checkpoints:
        present = f"only incomplete ones ({', '.join(path.name for path in checkpoints.values())})"
    raise ConfigurationError(
        f"there is no state to load in {directory}: it has {present}. Save one first, or give load_state its path."
    )


def newest_saved(directory: Path) -> Path:
    """The complete checkpoint, of any name, that was saved last."""
    if directory.is_dir():
        recover_all(directory)
        for info in reversed(list_checkpoints(directory)):
            if info.complete:
                return info.path
    raise ConfigurationError(
        f"there is no state to load in {directory}: no directory in it is a complete checkpoint. Give load_state its "
        "path."
    )


def rotate(directory: Path, total_limit: int, newest: Path) -> list[Path]:
    """Delete the checkpoints with the lowest numbers until ``total_limit`` are left, but never the newest.

    A checkpoint that is a link to another place was put there by the user: it is neither counted nor deleted.
    """
    old = [path for path in numbered_checkpoints(directory).values() if path != newest and not path.is_symlink()]
    surplus = old[: max(0, len(old) + 1 - max(total_limit, 1))]
    for path in surplus:
        delete(path, aside(path, DELETED))
    remove_leftovers(directory)
    return surplus

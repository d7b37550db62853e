"""Folders of checkpoints: a new one takes its name only when it is whole, and old ones go only after that."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from accel_state.errors import ConfigurationError

from .checkpoint_files import CheckpointError, rng_file
from .manifest import MANIFEST_NAME, Manifest

_NUMBERED = re.compile(r"checkpoint_([0-9]+)")
_OF_A_STATE = re.compile(
    r"(model(_\d+)?\.safetensors|(pytorch_model|optimizer|scheduler|sampler|dl_state_dict)(_\d+)?\.bin|scaler\.pt"
    r"|(random_states|custom_checkpoint)_\d+\.pkl|" + re.escape(MANIFEST_NAME) + r")"
)


class CheckpointFolder:
    """One checkpoint on its way to its name.

    It is written in ``.<name>.partial`` beside its place. If an older one is at that place, it is moved to ``.<name>.replaced`` for
    the moment between two renames; a process killed just then leaves it there, and :meth:`recover` puts it back.

    Args:
        target: the place.
    """

    def __init__(self, target: str | os.PathLike[str]) -> None:
        # Of a link, the folder behind it is what is replaced.
        self.target = Path(target).resolve()
        self.partial = self.target.parent / f".{self.target.name}.partial"
        self.replaced = self.target.parent / f".{self.target.name}.replaced"

    def begin(self) -> None:
        """Make the folder to write into.

        Raises:
            ConfigurationError: the target is a file, or the working directory.
        """
        if self.target.is_file():
            raise ConfigurationError(f"{self.target} is a file. Give a folder to save the state in.")
        if self.target == Path.cwd():
            raise ConfigurationError(f"{self.target} is the working directory, which cannot be replaced. Give a folder inside it.")
        self.recover()
        shutil.rmtree(self.partial, ignore_errors=True)
        self.partial.mkdir(parents=True)

    def abandon(self) -> None:
        """Remove what was written; the older checkpoint, if there is one, is left as it was."""
        shutil.rmtree(self.partial, ignore_errors=True)

    def commit(self) -> None:
        """Put what was written in its place. Files in the folder that belong to no checkpoint stay."""
        _sync_tree(self.partial)
        if self.target.exists():
            os.rename(self.target, self.replaced)
        try:
            os.rename(self.partial, self.target)
        except OSError:
            if self.replaced.exists():
                os.rename(self.replaced, self.target)
            raise
        _sync(self.target.parent)
        self._clear_replaced()

    def recover(self) -> None:
        """Finish, or take back, a replacement that was interrupted."""
        if not self.replaced.exists():
            return
        if self.target.exists():
            self._clear_replaced()
        else:
            os.rename(self.replaced, self.target)

    @contextmanager
    def explaining_write_errors(self) -> Iterator[None]:
        """A block that writes; of what goes wrong in it with the disk, say how much space there is."""
        try:
            yield
        except Exception as error:
            if not _is_write_error(error):
                raise
            free = shutil.disk_usage(self.target.parent).free
            raise CheckpointError(
                f"the state could not be written to {self.target}, with {free / 2**20:.1f} MiB free there "
                f"({type(error).__name__}: {error}). Make room, or save elsewhere; what was there before is unchanged."
            ) from error

    def _clear_replaced(self) -> None:
        if not self.replaced.exists():
            return
        for entry in _foreign_entries(self.replaced):
            if not (self.target / entry.name).exists():
                os.rename(entry, self.target / entry.name)
        shutil.rmtree(self.replaced)


def _is_write_error(error: Exception) -> bool:
    """Whether an error is of the file system; torch and safetensors have their own kinds for that."""
    of_a_writer = type(error).__name__ == "SafetensorError" or "inline_container" in str(error) or "PytorchStreamWriter" in str(error)
    return isinstance(error, OSError) or of_a_writer


def _foreign_entries(folder: Path) -> list[Path]:
    """What lies in a checkpoint's folder and is no part of it."""
    try:
        manifest = Manifest.read(folder)
    except CheckpointError:
        manifest = None
    own = {name.split("/")[0] for name in manifest.files} if manifest is not None else set()
    return [entry for entry in folder.iterdir() if entry.name not in own and not _OF_A_STATE.fullmatch(entry.name)]


def _sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_tree(folder: Path) -> None:
    for parent, _, names in os.walk(folder, topdown=False):
        for name in names:
            _sync(Path(parent) / name)
        _sync(Path(parent))


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
    """Whether a checkpoint is whole, as far as can be seen without reading its files; without a manifest, whether it has generators."""
    try:
        manifest = Manifest.read(folder)
    except CheckpointError:
        return False
    return (folder / rng_file(0)).is_file() if manifest is None else manifest.has_sizes_of(folder)


def newest_complete(folder: Path) -> Path:
    """The automatically named checkpoint with the highest number that is whole.

    Raises:
        ConfigurationError: there is none.
    """
    found = numbered_checkpoints(folder)
    for path in reversed(found.values()):
        if is_complete(path):
            return path
    seen = f"only incomplete ones ({', '.join(path.name for path in found.values())})" if found else "no checkpoint_<number>"
    raise ConfigurationError(f"there is no state to load in {folder}: it has {seen}. Save one first, or give load_state its path.")


def rotate(folder: Path, total_limit: int, newest: Path) -> list[Path]:
    """Delete the checkpoints with the lowest numbers until ``total_limit`` are left, but never the newest.

    Returns:
        Those that were deleted.
    """
    old = [path for path in numbered_checkpoints(folder).values() if path != newest]
    surplus = old[: max(0, len(old) + 1 - max(total_limit, 1))]
    for path in surplus:
        # Under another name it is no checkpoint any more, if deleting it is interrupted.
        os.rename(path, path.parent / f".{path.name}.deleted")
    for leftover in folder.glob(".checkpoint_*.deleted"):
        shutil.rmtree(leftover)
    return surplus

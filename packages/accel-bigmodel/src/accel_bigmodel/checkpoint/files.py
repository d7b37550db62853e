"""Locating the files of a checkpoint: a file, an index of shards, a directory, a URL of one, or a Hub repository.

Imports no torch.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path, PurePosixPath, PureWindowsPath

from accel_state.errors import ConfigurationError
from accel_state.storage.url import RemotePath, is_url

SAFETENSORS = ".safetensors"
_PICKLES = (".bin", ".pt", ".pth")
# Tried first, in this order, in a directory with several checkpoints.
_STANDARD_NAMES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
_REPOSITORY = re.compile(r"[\w.-]+(/[\w.-]+)?")


def checkpoint_files(checkpoint: str | os.PathLike[str]) -> dict[Path, list[str] | None]:
    """Return the files of a checkpoint, each with the names that its index lists, or None without an index."""
    path = _downloaded(RemotePath(os.fspath(checkpoint))) if is_url(checkpoint) else Path(checkpoint)
    if path.is_dir():
        path = _in_directory(path)
    elif not path.exists():
        path = _in_directory(_from_hub(os.fspath(checkpoint)))
    return dict(files_of_index(path)) if path.suffix == ".json" else {path: None}


def _downloaded(checkpoint: RemotePath) -> Path:
    from accel_state.storage.transfer import local_copy  # local checkpoints do not pay for its import

    name, directory = checkpoint.name, checkpoint.parent
    if not name.endswith((SAFETENSORS, ".json", *_PICKLES)):
        return local_copy(checkpoint)
    copy = local_copy(directory, (name,))
    if name.endswith(".json"):
        shards = {_relative_path(file, copy / name).as_posix() for file in _weight_map(copy / name).values()}
        copy = local_copy(directory, (name, *sorted(shards)))
    return copy / name


def _in_directory(directory: Path) -> Path:
    for name in _STANDARD_NAMES:
        if (directory / name).is_file():
            return directory / name
    files = sorted(path for path in directory.iterdir() if path.is_file())
    for candidates in (
        [path for path in files if path.name.endswith("index.json")],
        [path for path in files if path.suffix == SAFETENSORS],
        [path for path in files if path.suffix in _PICKLES],
    ):
        if len(candidates) == 1:
            return candidates[0]
        if candidates:
            raise ConfigurationError(
                f"{directory} holds several checkpoints: {[path.name for path in candidates]}. Give the path of one."
            )
    raise ConfigurationError(f"{directory} holds no weights: no .safetensors file, no .bin file and no shard index")


def _from_hub(repository: str) -> Path:
    if not _REPOSITORY.fullmatch(repository) or repository.endswith((SAFETENSORS, ".json", *_PICKLES)):
        raise ConfigurationError(
            f"checkpoint {repository!r} does not exist: give a file, a directory, or a Hub repository"
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        # Download only one format of a repository that holds both.
        for pattern in (["*.safetensors", "*.safetensors.index.json"], ["*.bin", "*.bin.index.json"]):
            directory = Path(snapshot_download(repository, allow_patterns=pattern, ignore_patterns=["*/*"]))
            if any(path.suffix in {SAFETENSORS, ".bin"} for path in directory.iterdir()):
                return directory
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ConfigurationError(
            f"checkpoint {repository!r} is not a local file or directory, and downloading it from the Hub failed: "
            f"{error}"
        ) from error
    raise ConfigurationError(f"the Hub repository {repository!r} holds no weights: no .safetensors and no .bin file")


def files_of_index(path: Path) -> dict[Path, list[str]]:
    """Return the shards of an index (``{"weight_map": {name: file}}``, or the inner part) with their tensor names."""
    files: dict[Path, list[str]] = {}
    for name, file in _weight_map(path).items():
        files.setdefault(path.parent / _relative_path(file, path), []).append(name)
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ConfigurationError(f"{path} lists missing files: {missing}. Download or save the checkpoint again.")
    return files


def _weight_map(path: Path) -> dict[str, str]:
    """Return the file of each tensor, by its name, as an index says it."""
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigurationError(f"{path} is not a shard index: {error}") from error
    weight_map = index.get("weight_map", index) if isinstance(index, dict) else None
    if not weight_map or not isinstance(weight_map, dict) or not all(isinstance(f, str) for f in weight_map.values()):
        raise ConfigurationError(f"{path} is not a shard index: it must map names of weights to file names")
    return weight_map


def _relative_path(file: str, index: Path) -> PurePosixPath:
    """Refuse paths out of the index's directory. Links inside it are fine: the Hub's cache consists of them."""
    path = PurePosixPath(file)
    if path.is_absolute() or ".." in path.parts or "\\" in file or PureWindowsPath(file).drive:
        raise ConfigurationError(
            f"{index} names {file!r}, which is outside its directory; such a checkpoint is not loaded"
        )
    return path

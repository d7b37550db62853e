"""Finding the files of a checkpoint: one file, shards with an index, a folder, or a repository of the Hub."""

from __future__ import annotations

import json
import os
import re
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import torch

from accel_state.errors import ConfigurationError

from .safetensors_file import SafetensorsFile

_SAFETENSORS = ".safetensors"
_PICKLES = (".bin", ".pt", ".pth")
# The names that are looked for first in a folder with several checkpoints.
_WHOLE = ("model.safetensors", "pytorch_model.bin")
_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_REPOSITORY = re.compile(r"[\w.-]+(/[\w.-]+)?")


class TorchFile:
    """The tensors of a file that ``torch.save`` wrote. It is mapped where its format allows; no code in it is ever run.

    Args:
        path: the file.

    Raises:
        ConfigurationError: it holds more than tensors by name.
    """

    in_place = False

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            held = torch.load(self.path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(self.path))
        except (
            Exception
        ) as error:  # torch raises UnpicklingError, RuntimeError, EOFError and others for what it cannot read
            if isinstance(error, (MemoryError, OSError)):
                raise
            raise ConfigurationError(
                f"{self.path} cannot be read as weights: {error}. Only tensors are loaded, never code; save it as "
                "safetensors."
            ) from error
        if not isinstance(held, Mapping) or not all(isinstance(value, torch.Tensor) for value in held.values()):
            raise ConfigurationError(
                f"{self.path} does not hold tensors by name, but {_describe(held)}. Save model.state_dict()."
            )
        self._held: dict[str, torch.Tensor] = dict(held)

    def names(self) -> list[str]:
        """Names of the tensors."""
        return list(self._held)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        return tuple(self._held[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        """Type of a tensor."""
        return self._held[name].dtype

    def tensors(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Tensors that stay."""
        return {name: self._held[name] for name in names}


def _describe(held: Any) -> str:
    if isinstance(held, Mapping):
        return f"a dictionary with {sorted({type(value).__name__ for value in held.values()})}"
    return f"a {type(held).__name__}"


CheckpointFile = SafetensorsFile | TorchFile


def open_file(path: Path) -> CheckpointFile:
    """Open a file of weights, whatever its format."""
    return SafetensorsFile(path) if path.name.endswith(_SAFETENSORS) else TorchFile(path)


def checkpoint_files(checkpoint: str | os.PathLike[str]) -> dict[Path, list[str] | None]:
    """The files of a checkpoint, each with the names that it should hold, or None where no index says so.

    Args:
        checkpoint: a file of weights; an index file; a folder with one of the two; or the name of a repository on the
            Hub ("openai-community/gpt2"), which is downloaded, or found in the cache when the Hub is offline.

    Raises:
        ConfigurationError: nothing there, several candidates, or an index that names files outside its folder or
            missing ones.
    """
    path = Path(checkpoint)
    if path.is_dir():
        path = _in_folder(path)
    elif not path.exists():
        path = _in_folder(_from_hub(os.fspath(checkpoint)))
    return _from_index(path) if path.suffix == ".json" else {path: None}


def _in_folder(folder: Path) -> Path:
    for names in (_WHOLE[:1], _INDEXES[:1], _WHOLE[1:], _INDEXES[1:]):
        if (folder / names[0]).is_file():
            return folder / names[0]
    found = sorted(path for path in folder.iterdir() if path.is_file())
    for candidates in (
        [path for path in found if path.name.endswith("index.json")],
        [path for path in found if path.suffix == _SAFETENSORS],
        [path for path in found if path.suffix in _PICKLES],
    ):
        if len(candidates) == 1:
            return candidates[0]
        if candidates:
            raise ConfigurationError(
                f"{folder} holds several checkpoints: {[path.name for path in candidates]}. Give the path of one."
            )
    raise ConfigurationError(f"{folder} holds no weights: no safetensors file, no .bin file and no index of shards")


def _from_hub(repository: str) -> Path:
    if not _REPOSITORY.fullmatch(repository) or repository.endswith((_SAFETENSORS, ".json", *_PICKLES)):
        raise ConfigurationError(
            f"the checkpoint {repository!r} does not exist: give a file, a folder, or a repository of the Hub"
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        # Of a repository with both formats only the first is fetched.
        for pattern in (["*.safetensors", "*.safetensors.index.json"], ["*.bin", "*.bin.index.json"]):
            folder = Path(snapshot_download(repository, allow_patterns=pattern, ignore_patterns=["*/*"]))
            if any(path.suffix in {_SAFETENSORS, ".bin"} for path in folder.iterdir()):
                return folder
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ConfigurationError(
            f"the checkpoint {repository!r} is neither a file nor a folder, and as a repository of the Hub it cannot "
            f"be had: {error}"
        ) from error
    raise ConfigurationError(f"the repository {repository!r} holds no weights: no safetensors file and no .bin file")


def _from_index(path: Path) -> dict[Path, list[str] | None]:
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigurationError(f"{path} is not an index of shards: {error}") from error
    weight_map = index.get("weight_map", index) if isinstance(index, dict) else None
    if (
        not isinstance(weight_map, dict)
        or not weight_map
        or not all(isinstance(file, str) for file in weight_map.values())
    ):
        raise ConfigurationError(f"{path} is not an index of shards: it should map names of weights to names of files")
    files: dict[Path, list[str] | None] = {}
    for name, file in weight_map.items():
        names = files.setdefault(path.parent / _inside(file, path), [])
        assert names is not None
        names.append(name)
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ConfigurationError(
            f"{path} names files that are not there: {missing}. Download or save the checkpoint again."
        )
    return files


def _inside(file: str, index: Path) -> PurePosixPath:
    """The name of a file in the index's folder. Links in the folder are fine: the Hub's cache consists of them."""
    path = PurePosixPath(file)
    if path.is_absolute() or ".." in path.parts or "\\" in file or PureWindowsPath(file).drive:
        raise ConfigurationError(
            f"{index} names {file!r}, which is outside its folder; such a checkpoint is not loaded"
        )
    return path

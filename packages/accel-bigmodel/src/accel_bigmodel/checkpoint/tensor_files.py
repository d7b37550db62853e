"""Opening a file of weights, whatever its format."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from accel_state.errors import ConfigurationError

from .files import SAFETENSORS
from .safetensors_file import SafetensorsFile


class TorchFile:
    """The tensors of a file written by ``torch.save``, mapped if its format allows. Code in it is never run."""

    in_place = False

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            content = torch.load(self.path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(self.path))
        except (MemoryError, OSError):
            raise
        except Exception as error:  # torch raises UnpicklingError, RuntimeError, EOFError and others
            raise ConfigurationError(
                f"{self.path} cannot be read as weights: {error}. Only tensors are loaded, never code; save it as "
                "safetensors."
            ) from error
        if not isinstance(content, Mapping) or not all(isinstance(value, torch.Tensor) for value in content.values()):
            raise ConfigurationError(
                f"{self.path} holds {_describe(content)} instead of a dictionary of tensors. Save model.state_dict()."
            )
        self._tensors: dict[str, torch.Tensor] = dict(content)

    def names(self) -> list[str]:
        """Names of the tensors."""
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        return tuple(self._tensors[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        """Dtype of a tensor."""
        return self._tensors[name].dtype

    def tensors(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Several tensors."""
        return {name: self._tensors[name] for name in names}


def _describe(content: object) -> str:
    if isinstance(content, Mapping):
        return f"a dictionary with {sorted({type(value).__name__ for value in content.values()})}"
    return f"a {type(content).__name__}"


CheckpointFile = SafetensorsFile | TorchFile


def open_file(path: Path) -> CheckpointFile:
    """Open a file of weights, whatever its format."""
    return SafetensorsFile(path) if path.name.endswith(SAFETENSORS) else TorchFile(path)

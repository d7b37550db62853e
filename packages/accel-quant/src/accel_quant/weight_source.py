"""Where the weights to quantize come from: the model itself, or a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from accel_bigmodel.checkpoint.files import CheckpointFile, checkpoint_files, open_file
from accel_state.errors import ConfigurationError


class ModelWeights:
    """The weights that the model has.

    Raises:
        ConfigurationError: some are on the meta device.
    """

    def __init__(self, model: nn.Module) -> None:
        self._tensors = dict(model.named_parameters(remove_duplicate=False))
        empty = [name for name, tensor in self._tensors.items() if tensor.is_meta]
        if empty:
            raise ConfigurationError(
                f"{len(empty)} weights of the model have no values: they are on the meta device "
                f"({', '.join(empty[:3])}, ...). Say where "
                "the checkpoint is with weights_location, or load it first."
            )

    def names(self) -> Mapping[str, Any]:
        """Every name."""
        return self._tensors

    def read(self, name: str) -> torch.Tensor:
        """A tensor."""
        return self._tensors[name].detach()

    def place(self, names: list[str]) -> Path | None:
        """The one safetensors file that holds all of these, or None."""
        return None


class CheckpointWeights:
    """The weights in the files of a checkpoint, read one by one.

    Args:
        location: a file, an index, a folder, or a repository on the Hub.

    Raises:
        ConfigurationError: no such checkpoint, or a damaged one.
    """

    def __init__(self, location: str | os.PathLike[str]) -> None:
        self._files: dict[str, CheckpointFile] = {}
        for path, names in checkpoint_files(location).items():
            file = open_file(path)
            self._files.update(dict.fromkeys(file.names() if names is None else names, file))

    def names(self) -> Mapping[str, Any]:
        """Every name."""
        return self._files

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor."""
        return self._files[name].shape(name)

    def dtype(self, name: str) -> torch.dtype:
        """The type of a tensor."""
        return self._files[name].dtype(name)

    def read(self, name: str) -> torch.Tensor:
        """A tensor, mapped where the file allows."""
        return self._files[name].tensors([name])[name]

    def place(self, names: list[str]) -> Path | None:
        """The one safetensors file that holds all of these, or None."""
        files = {id(self._files[name]): self._files[name] for name in names}
        file = next(iter(files.values()))
        return file.path if len(files) == 1 and file.path.suffix == ".safetensors" else None


Weights = ModelWeights | CheckpointWeights

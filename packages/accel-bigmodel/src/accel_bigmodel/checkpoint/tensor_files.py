"""Opening a file of weights, whatever its format."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import torch

from accel_state.errors import ConfigurationError

from .files import SAFETENSORS
from .safetensors_file import SafetensorsFile


class TorchFile:
    """The tensors of a file written by ``torch.save``, mapped if its format allows. Code in it is never run.

    They may be under a key of a checkpoint of training, such as "state_dict", "model_state_dict", "model" or "module",
    also within another dictionary.
    """

    in_place = False

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path: Path = Path(path)
        try:
            content = torch.load(self.path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(self.path))
        except (MemoryError, OSError):
            raise
        except Exception as error:  # torch raises UnpicklingError, RuntimeError, EOFError and others
            raise ConfigurationError(
                f"{self.path} cannot be read as weights: {error}. Only tensors are loaded, never code; save it as "
                "safetensors."
            ) from error
        self._tensors: dict[str, torch.Tensor] = dict(_weights_in(content, self.path))

    def names(self) -> list[str]:
        """Return the names of the tensors."""
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


# Under which training loops save a model's state dict, next to optimizers and counters: Lightning and many others;
# torch's tutorials; timm and detectron2; DeepSpeed; others.
_NESTINGS = (
    *("state_dict", "model_state_dict", "model", "module"),
    *("model_state", "net", "net_state_dict", "network", "network_state_dict", "weights"),
)


def _weights_in(content: Any, path: Path) -> Mapping[str, torch.Tensor]:
    """Return a file's tensors by name: all of them, or those under the one key that holds a model's weights."""
    if _is_weights(content):
        return cast("Mapping[str, torch.Tensor]", content)
    found: dict[tuple[Any, ...], Mapping[str, torch.Tensor]]
    found = {(key,): weights for key, weights in _nested_weights(content).items()}
    if not found and isinstance(content, Mapping):
        # One level deeper, such as {"model": {"state_dict": ...}}.
        for outer, value in content.items():
            found |= {(outer, key): weights for key, weights in _nested_weights(value).items()}
    usual = [keys for keys in found if keys[-1] in _NESTINGS]
    if len(usual) == 1:
        return found[usual[0]]
    advice = "Save model.state_dict()."
    if candidates := ["".join(f"[{key!r}]" for key in keys) for keys in usual or found]:
        advice = (
            f"Save the weights alone; they may be in {' or '.join(candidates)}: "
            f"torch.save(torch.load(path, weights_only=True){candidates[0]}, 'weights.bin')."
        )
    raise ConfigurationError(f"{path} holds {_describe(content)} instead of a dictionary of tensors. {advice}")


def _nested_weights(content: Any) -> dict[Any, Mapping[str, torch.Tensor]]:
    """Return the values of a mapping that are dictionaries of tensors, and not empty."""
    if not isinstance(content, Mapping):
        return {}
    return {key: value for key, value in content.items() if _is_weights(value) and value}


def _is_weights(content: object) -> bool:
    return isinstance(content, Mapping) and all(
        isinstance(name, str) and isinstance(value, torch.Tensor) for name, value in content.items()
    )


def _describe(content: object) -> str:
    if isinstance(content, Mapping):
        return f"a dictionary with {sorted({type(value).__name__ for value in content.values()})}"
    return f"a {type(content).__name__}"


CheckpointFile = SafetensorsFile | TorchFile


def open_file(path: Path) -> CheckpointFile:
    """Open a file of weights, whatever its format."""
    return SafetensorsFile(path) if path.name.endswith(SAFETENSORS) else TorchFile(path)

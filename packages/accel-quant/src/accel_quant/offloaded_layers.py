"""Quantized layers whose weights are kept elsewhere, and are there only while the layer computes."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from .quantizers.base import Quantizer


class FileStore:
    """Tensors in a safetensors file, mapped when they are read.

    Args:
        path: the file.
        names: for each name in the layer's state dict, the name in the file.
    """

    def __init__(self, path: Path, names: Mapping[str, str]) -> None:
        self.path, self.names = path, dict(names)

    def read(self) -> dict[str, torch.Tensor]:
        """All tensors, by their names in the layer."""
        with safe_open(self.path, framework="pt") as file:
            return {name: file.get_tensor(source) for name, source in self.names.items()}


class MemoryStore:
    """Tensors in the memory of the host."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = {name: tensor.to("cpu") for name, tensor in tensors.items()}

    def read(self) -> dict[str, torch.Tensor]:
        """All tensors, by their names in the layer."""
        return dict(self._tensors)


def keep_elsewhere(
    layer: nn.Linear, quantizer: Quantizer, store: FileStore | MemoryStore, device: torch.device
) -> None:
    """Take the weight out of a quantized layer; from now on it is read for each forward.

    Args:
        layer: the layer, whose class becomes a subclass of its own one.
        quantizer: what made it.
        store: where the weight and what belongs to it are.
        device: where the layer computes.
    """
    quantizer.release(layer)
    layer.__dict__["_stored"] = _Stored(quantizer, store, device)
    layer.__class__ = _stored_class(type(layer))


class _Stored:
    """What a layer needs to get its weight. Threads that call one model take turns at a layer."""

    def __init__(self, quantizer: Quantizer, store: FileStore | MemoryStore, device: torch.device) -> None:
        self.quantizer, self.store, self.device = quantizer, store, device
        self.lock = threading.Lock()
        self.in_state_dict = True

    def __deepcopy__(self, memo: Any) -> _Stored:
        return _Stored(self.quantizer, self.store, self.device)


class StoredLayer:
    """What is added to the class of a layer whose weight is kept elsewhere."""

    _stored: _Stored

    def forward(self, x: torch.Tensor) -> Any:
        """Read the weight, compute, and let go of it."""
        stored, layer = self._stored, self
        with stored.lock:
            stored.quantizer.restore(layer, stored.store.read(), stored.device)  # type: ignore[arg-type]
            try:
                return super().forward(x.to(stored.device))  # type: ignore[misc]
            finally:
                stored.quantizer.release(layer)  # type: ignore[arg-type]

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        nn.Module._save_to_state_dict(self, destination, prefix, keep_vars)  # type: ignore[arg-type]
        if self._stored.in_state_dict:
            destination.update({prefix + name: tensor for name, tensor in self._stored.store.read().items()})


_CLASSES: dict[type[nn.Linear], type[nn.Linear]] = {}


def _stored_class(base: type[nn.Linear]) -> type[nn.Linear]:
    if base not in _CLASSES:
        _CLASSES[base] = type(f"Stored{base.__name__}", (StoredLayer, base), {})
    return _CLASSES[base]

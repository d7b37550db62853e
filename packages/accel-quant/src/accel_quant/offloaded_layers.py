"""Quantized layers that have their weights only while they compute."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from accel_bigmodel.checkpoint.safetensors_file import SafetensorsFile

from ._torch_compat import save_to_state_dict
from .quantizers.base import Quantizer


class FileStore:
    """Tensors of a safetensors file, mapped when they are read."""

    def __init__(self, file: SafetensorsFile, names: Mapping[str, str]) -> None:
        self.file: SafetensorsFile = file
        self.names: dict[str, str] = dict(names)

    def read(self) -> dict[str, torch.Tensor]:
        """Return all tensors, by their names in the layer."""
        tensors = self.file.tensors(self.names.values())
        return {name: tensors[source] for name, source in self.names.items()}


class MemoryStore:
    """Tensors in host memory, by their names in the layer."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = dict(tensors)

    def read(self) -> dict[str, torch.Tensor]:
        """Return all tensors, by their names in the layer."""
        return dict(self._tensors)


class _Offload:
    """How a layer gets its weight. Threads that share a model use a layer one after the other."""

    def __init__(self, quantizer: Quantizer, store: FileStore | MemoryStore, device: torch.device) -> None:
        self.quantizer, self.store, self.device = quantizer, store, device
        self.lock = threading.Lock()
        self.in_state_dict = True

    def __deepcopy__(self, memo: Any) -> _Offload:
        return _Offload(self.quantizer, self.store, self.device)


class OffloadedLayer:
    """Combined with the class of a quantized layer whose weight is offloaded."""

    _offload: _Offload

    def forward(self, x: torch.Tensor) -> Any:
        """Load the weight, compute, and release the weight."""
        offload, layer = self._offload, self
        with offload.lock:
            offload.quantizer.restore(layer, offload.store.read(), offload.device)  # type: ignore[arg-type]
            try:
                return super().forward(x.to(offload.device))  # type: ignore[misc]
            finally:
                offload.quantizer.release(layer)  # type: ignore[arg-type]

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        save_to_state_dict(self, destination, prefix, keep_vars)  # type: ignore[arg-type]
        if self._offload.in_state_dict:
            destination.update({prefix + name: tensor for name, tensor in self._offload.store.read().items()})


_CLASSES: dict[type[nn.Linear], type[nn.Linear]] = {}


def offload_layer(layer: nn.Linear, quantizer: Quantizer, store: FileStore | MemoryStore, device: torch.device) -> None:
    """Release the weight of a quantized layer; each forward reads it from ``store`` to ``device``.

    The class of the layer becomes a subclass of its class.
    """
    quantizer.release(layer)
    layer.__dict__["_offload"] = _Offload(quantizer, store, device)
    layer_class = type(layer)
    if layer_class not in _CLASSES:
        _CLASSES[layer_class] = type(f"Offloaded{layer_class.__name__}", (OffloadedLayer, layer_class), {})
    layer.__class__ = _CLASSES[layer_class]

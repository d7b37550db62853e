"""Quantized layers that have their weights only while they compute."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ._torch_compat import save_to_state_dict
from .quantizers.base import Quantizer

Read = Callable[[], dict[str, torch.Tensor]]
"""Returns the tensors of an offloaded weight, by their names in the layer."""


class _Offload:
    """How a layer gets its weight. Threads that share a model use a layer one after the other."""

    def __init__(self, quantizer: Quantizer, read: Read, device: torch.device) -> None:
        self.quantizer, self.read, self.device = quantizer, read, device
        self.lock = threading.Lock()
        self.in_state_dict = True

    def __deepcopy__(self, memo: Any) -> _Offload:
        return _Offload(self.quantizer, self.read, self.device)


class OffloadedLayer:
    """Combined with the class of a quantized layer whose weight is offloaded."""

    _offload: _Offload

    def forward(self, x: torch.Tensor) -> Any:
        """Load the weight, compute, and release the weight."""
        offload, layer = self._offload, self
        with offload.lock:
            offload.quantizer.restore(layer, offload.read(), offload.device)  # type: ignore[arg-type]
            try:
                return super().forward(x.to(offload.device))  # type: ignore[misc]
            finally:
                offload.quantizer.release(layer)  # type: ignore[arg-type]

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        save_to_state_dict(self, destination, prefix, keep_vars)  # type: ignore[arg-type]
        if self._offload.in_state_dict:
            destination.update({prefix + name: tensor for name, tensor in self._offload.read().items()})


_CLASSES: dict[type[nn.Linear], type[nn.Linear]] = {}


def offload_layer(layer: nn.Linear, quantizer: Quantizer, read: Read, device: torch.device) -> None:
    """Release the weight of a quantized layer; each forward reads it to ``device``.

    The class of the layer becomes a subclass of its class.
    """
    quantizer.release(layer)
    layer.__dict__["_offload"] = _Offload(quantizer, read, device)
    layer_class = type(layer)
    if layer_class not in _CLASSES:
        _CLASSES[layer_class] = type(f"Offloaded{layer_class.__name__}", (OffloadedLayer, layer_class), {})
    layer.__class__ = _CLASSES[layer_class]

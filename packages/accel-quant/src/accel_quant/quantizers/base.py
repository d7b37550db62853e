"""The interface of a quantization method."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import cache
from typing import Any, ClassVar

import torch
from torch import nn

from accel_state.enums import CustomDtype
from accel_state.errors import ConfigurationError, require


class Quantizer(ABC):
    """Quantizes linear layers, and converts their weights to tensors that can be saved and offloaded.

    Other packages add methods through the entry point group ``accel.quantizers``. A configuration names one in its
    attribute ``quantizer``, and has the attributes ``torch_dtype``, ``skip_modules`` and ``keep_in_fp32_modules``.

    Attributes:
        dtype: the dtype of a quantized weight, for the sizes in device maps.
        layer_class: the class of quantized layers.
    """

    dtype: ClassVar[torch.dtype | CustomDtype]

    def __init__(self, config: Any) -> None:
        self.config = config

    @property
    @abstractmethod
    def layer_class(self) -> type[nn.Linear]:
        """The class of quantized layers."""

    @abstractmethod
    def layer(self, linear: nn.Linear) -> nn.Linear:
        """Return a layer with the shape of ``linear``, on the meta device and without a bias."""

    @abstractmethod
    def quantize(self, layer: nn.Linear, weight: torch.Tensor, device: torch.device) -> None:
        """Quantize a weight on the device, and put it into the layer."""

    @abstractmethod
    def companions(self, name: str, names: Mapping[str, Any]) -> list[str]:
        """Return the checkpoint entries that belong to the quantized weight ``name``; none if it is not quantized."""

    def tensors(self, layer: nn.Linear) -> dict[str, torch.Tensor]:
        """Return the quantized weight and its companions, named as in a state dict of the layer."""
        return {key: value.detach() for key, value in layer.state_dict().items() if key != "bias"}

    @abstractmethod
    def restore(self, layer: nn.Linear, tensors: Mapping[str, torch.Tensor], device: torch.device) -> None:
        """Put the result of :meth:`tensors` into the layer, on the device.

        Raises:
            ConfigurationError: the tensors come from another quantization method.
        """

    @abstractmethod
    def release(self, layer: nn.Linear) -> None:
        """Remove the weight from the layer."""


@cache
def bitsandbytes_nn() -> Any:
    """``bitsandbytes.nn``.

    Raises:
        MissingDependencyError: bitsandbytes is not installed.
        ConfigurationError: it is older than 0.47.
    """
    library = require("bitsandbytes", purpose="BnbQuantizationConfig", install="bitsandbytes>=0.47")
    if [int(number) for number in library.__version__.split(".")[:2]] < [0, 47]:
        raise ConfigurationError(
            f"bitsandbytes {library.__version__} quantizes 8-bit weights once more whenever a model on a CPU is moved, "
            "and the outputs are wrong. Install 0.47 or later: pip install 'bitsandbytes>=0.47'."
        )
    return library.nn

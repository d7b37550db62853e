"""What a quantizer is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from accel_state.enums import CustomDtype


class Quantizer(ABC):
    """Turns linear layers into quantized ones, and their weights into tensors that can be saved and offloaded.

    Other packages add their own through the entry point group ``accel.quantizers``; a configuration names one by its
    attribute ``quantizer``, and has the attributes ``torch_dtype``, ``skip_modules`` and ``keep_in_fp32_modules``.

    Args:
        config: the configuration.

    Attributes:
        dtype: what a quantized weight takes, for device maps.
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
        """A layer of the shape of ``linear``, on the meta device, without a bias."""

    @abstractmethod
    def quantize(self, layer: nn.Linear, weight: torch.Tensor, device: torch.device) -> None:
        """Give the layer a weight, which is quantized on the device."""

    @abstractmethod
    def companions(self, name: str, names: Mapping[str, Any]) -> list[str]:
        """Which entries of a checkpoint belong to the quantized weight ``name``; none where it is not quantized."""

    @abstractmethod
    def tensors(self, layer: nn.Linear) -> dict[str, torch.Tensor]:
        """The quantized weight and what belongs to it, under the names that they have in a state dict of the layer."""

    @abstractmethod
    def restore(self, layer: nn.Linear, tensors: Mapping[str, torch.Tensor], device: torch.device) -> None:
        """Give the layer what :meth:`tensors` returned, on the device.

        Raises:
            ConfigurationError: the tensors are of another way to quantize.
        """

    @abstractmethod
    def release(self, layer: nn.Linear) -> None:
        """Take the weight out of the layer."""

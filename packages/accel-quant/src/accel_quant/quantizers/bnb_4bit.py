"""4-bit quantization of bitsandbytes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from accel_state.enums import CustomDtype
from accel_state.errors import ConfigurationError

from .base import Quantizer, bitsandbytes_nn


class Bnb4Bit(Quantizer):
    """QLoRA: blocks of 64 values with a scale each; the scales can be quantized too."""

    dtype: ClassVar[torch.dtype | CustomDtype] = CustomDtype.INT4

    @property
    def layer_class(self) -> type[nn.Linear]:
        return bitsandbytes_nn().Linear4bit

    def layer(self, linear: nn.Linear) -> nn.Linear:
        layer: Any = bitsandbytes_nn().Linear4bit(
            linear.in_features,
            linear.out_features,
            bias=False,
            compute_dtype=self.config.bnb_4bit_compute_dtype,
            compress_statistics=self.config.bnb_4bit_use_double_quant,
            quant_type=self.config.bnb_4bit_quant_type,
            device="meta",
        )
        # On CPUs with AVX512-BF16 the first forward would repack the weight: this rounds its scales to bfloat16, cannot
        # be undone for a state dict, and fails unless the number of rows is a multiple of 32.
        layer.support_avx512bf16_for_cpu = False
        return layer

    def quantize(self, layer: nn.Linear, weight: torch.Tensor, device: torch.device) -> None:
        parameter = bitsandbytes_nn().Params4bit(
            weight.detach(),
            requires_grad=False,
            compress_statistics=self.config.bnb_4bit_use_double_quant,
            quant_type=self.config.bnb_4bit_quant_type,
            module=layer,
        )
        layer.weight = parameter.to(device)

    def companions(self, name: str, names: Mapping[str, Any]) -> list[str]:
        return [other for other in names if other.startswith(f"{name}.")]

    def restore(self, layer: nn.Linear, tensors: Mapping[str, torch.Tensor], device: torch.device) -> None:
        statistics = {key.removeprefix("weight."): value for key, value in tensors.items() if key.startswith("weight.")}
        quant_types = [key.rpartition("bitsandbytes__")[2] for key in statistics if "bitsandbytes__" in key]
        if len(quant_types) != 1:
            raise ConfigurationError(
                "the checkpoint lacks the tensors that describe a 4-bit weight (weight.quant_state...). Save it again."
            )
        stored = {"bnb_4bit_quant_type": quant_types[0], "bnb_4bit_use_double_quant": "nested_absmax" in statistics}
        for name, value in stored.items():
            configured = getattr(self.config, name)
            if configured != value:
                raise ConfigurationError(
                    f"the checkpoint was quantized with {name}={value!r}, but the configuration says {configured!r}. "
                    f"Load it with {name}={value!r}."
                )
        layer.weight = bitsandbytes_nn().Params4bit.from_prequantized(
            data=tensors["weight"], quantized_stats=statistics, requires_grad=False, device=device, module=layer
        )

    def release(self, layer: Any) -> None:
        layer.weight = layer.quant_state = None

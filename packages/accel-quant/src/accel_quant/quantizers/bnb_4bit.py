"""bitsandbytes in 4 bits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from accel_state.enums import CustomDtype
from accel_state.errors import ConfigurationError

from ..bnb_import import bitsandbytes_nn
from .base import Quantizer


class Bnb4Bit(Quantizer):
    """QLoRA's 4 bits: blocks of 64 values with a scale each, which can be quantized themselves."""

    dtype = CustomDtype.INT4

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
        # be undone for a # state dict, and fails unless the rows are a multiple of 32.
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
        layer._parameters["weight"] = parameter.to(device)

    def companions(self, name: str, names: Mapping[str, Any]) -> list[str]:
        return [other for other in names if other.startswith(f"{name}.")]

    def tensors(self, layer: nn.Linear) -> dict[str, torch.Tensor]:
        return {key: value.detach() for key, value in layer.state_dict().items() if key != "bias"}

    def restore(self, layer: nn.Linear, tensors: Mapping[str, torch.Tensor], device: torch.device) -> None:
        statistics = {key.removeprefix("weight."): value for key, value in tensors.items() if key.startswith("weight.")}
        self._check(statistics)
        layer._parameters["weight"] = bitsandbytes_nn().Params4bit.from_prequantized(
            data=tensors["weight"], quantized_stats=statistics, requires_grad=False, device=device, module=layer
        )

    def _check(self, statistics: Mapping[str, Any]) -> None:
        kinds = [key.rpartition("bitsandbytes__")[2] for key in statistics if "bitsandbytes__" in key]
        if len(kinds) != 1:
            raise ConfigurationError(
                "the checkpoint lacks the tensors that describe a weight in 4 bits (weight.quant_state...). Save it "
                "again."
            )
        saved = {"bnb_4bit_quant_type": kinds[0], "bnb_4bit_use_double_quant": "nested_absmax" in statistics}
        for name, value in saved.items():
            asked = getattr(self.config, name)
            if asked != value:
                raise ConfigurationError(
                    f"the checkpoint was quantized with {name}={value!r}, and the configuration says {asked!r}. "
                    f"Load it with {name}={value!r}."
                )

    def release(self, layer: Any) -> None:
        layer._parameters["weight"] = None
        layer.quant_state = None

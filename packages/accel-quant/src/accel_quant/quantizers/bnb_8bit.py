"""8-bit quantization of bitsandbytes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from accel_state.errors import ConfigurationError

from .base import Quantizer, bitsandbytes_nn


class Bnb8Bit(Quantizer):
    """LLM.int8(): rows of int8 with a scale each; columns with outliers are computed in half precision."""

    dtype: ClassVar[torch.dtype] = torch.int8

    @property
    def layer_class(self) -> type[nn.Linear]:
        return bitsandbytes_nn().Linear8bitLt

    def layer(self, linear: nn.Linear) -> nn.Linear:
        return self.layer_class(  # type: ignore[call-arg]
            linear.in_features,
            linear.out_features,
            bias=False,
            has_fp16_weights=False,
            threshold=float(self.config.llm_int8_threshold),
            device="meta",
        )

    def quantize(self, layer: nn.Linear, weight: torch.Tensor, device: torch.device) -> None:
        # bitsandbytes quantizes a weight when it is moved from the CPU.
        parameter = bitsandbytes_nn().Int8Params(weight.detach().cpu(), requires_grad=False, has_fp16_weights=False)
        layer.weight = parameter.to(device)

    def companions(self, name: str, names: Mapping[str, Any]) -> list[str]:
        prefix = name.removesuffix("weight")
        return [prefix + part for part in ("SCB", "weight_format") if prefix + part in names]

    def restore(self, layer: nn.Linear, tensors: Mapping[str, torch.Tensor], device: torch.device) -> None:
        weight, scales = tensors["weight"], tensors.get("SCB")
        if weight.dtype != torch.int8 or scales is None:
            raise ConfigurationError(
                f"a weight of dtype {weight.dtype} was not saved with load_in_8bit (int8, with its scales as SCB). "
                "Load it with the configuration that it was saved with."
            )
        parameter = bitsandbytes_nn().Int8Params(weight.to(device), requires_grad=False, has_fp16_weights=False)
        parameter.CB, parameter.SCB = parameter.data, scales.to(device=device, dtype=torch.float32)
        layer.weight = parameter

    def release(self, layer: Any) -> None:
        layer.weight = layer.state.CB = layer.state.SCB = None

"""Layers of bitsandbytes in models that are trained."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from accel_state import get_logger
from accel_state.errors import ConfigurationError

logger = get_logger(__name__)


def quantized_layers(model: nn.Module) -> list[tuple[str, Any]]:
    """The layers of bitsandbytes in a model, with their names."""
    return [
        (name, module)
        for name, module in model.named_modules()
        if any(cls.__module__.startswith("bitsandbytes.") for cls in type(module).__mro__)
        and isinstance(module, nn.Linear)
    ]


def keep_packing(model: nn.Module, device: torch.device) -> None:
    """Stop 4-bit layers from rewriting their weights when they are evaluated on a CPU.

    With an AVX512-BF16 unit, ``Linear4bit`` packs its weight again, in place, at the first forward in evaluation mode,
    and takes a kernel without a backward pass from then on. Training after an evaluation then has no gradients, and
    where FSDP gathers the weight anew it is read in the wrong packing.
    """
    if device.type != "cpu":
        return
    for name, layer in quantized_layers(model):
        state = getattr(getattr(layer, "weight", None), "quant_state", None)
        if state is None:
            continue
        if getattr(state, "packing_format_for_cpu", False):
            layer.state_dict()  # converts the weight back, in place
            logger.warning(
                "%s was evaluated before it was prepared: bitsandbytes has rounded the scales of its 4-bit weights to "
                "bfloat16 for that. Prepare the model first to train the weights that were loaded.",
                name,
                main_process_only=True,
            )
        if hasattr(layer, "support_avx512bf16_for_cpu"):
            layer.support_avx512bf16_for_cpu = False
        elif hasattr(state, "packing_format_for_cpu"):
            raise ConfigurationError(
                f"{name} is a 4-bit layer of a version of bitsandbytes that rewrites weights on this CPU, and has no "
                "support_avx512bf16_for_cpu to turn that off. Install bitsandbytes>=0.49, or train on a GPU."
            )


def check_sharded(model: nn.Module, param_dtype: torch.dtype | None, version: int) -> None:
    """Refuse quantized layers that FSDP cannot shard.

    Args:
        model: a model that is about to be sharded.
        param_dtype: the type that parameters are gathered in; None for their own.
        version: of FSDP.
    """
    for name, layer in quantized_layers(model):
        storage = layer.weight.dtype
        if getattr(layer.weight, "quant_state", None) is None:
            raise ConfigurationError(
                f"{name} is a {type(layer).__name__}, and fsdp_version={version} cannot shard its 8-bit weights, which "
                "carry their scales outside of the tensor. Load the model in 4 bits, or train it with DDP."
            )
        if version == 1 and not storage.is_floating_point:
            raise ConfigurationError(
                f"{name} stores its 4-bit weights as {storage}, and fsdp_version=1 flattens floating-point types only. "
                "Load the model with bnb_4bit_quant_storage of the type of the other parameters, or use fsdp_version=2."
            )
        if storage.is_floating_point and param_dtype not in (None, storage):
            raise ConfigurationError(
                f"{name} stores its 4-bit weights as {storage}, and mixed precision would convert the packed bytes to "
                f"{param_dtype}. Load the model with bnb_4bit_quant_storage={param_dtype}."
            )

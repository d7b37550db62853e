"""Layers of bitsandbytes in models that are trained."""

from __future__ import annotations

import sys
from typing import Any, Final

import torch
from torch import nn

from accel_state import get_logger
from accel_state.collectives.single import Collectives
from accel_state.errors import ConfigurationError

from .unwrap import clean_name

logger: Final = get_logger(__name__)


def quantized_layers(model: nn.Module) -> list[tuple[str, Any]]:
    """Return the layers of bitsandbytes in a model, with their names."""
    if "bitsandbytes" not in sys.modules:  # then no object of its classes exists
        return []
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


def start_with_scales_of_rank_0(model: nn.Module, collectives: Collectives) -> None:
    """Send every rank what describes rank 0's 4-bit weights; wrappers send the bytes alone. Every rank must call it."""
    states = [state for _, layer in quantized_layers(model) if (state := _description(layer)) is not None]
    collectives.broadcast_many([tensor for state in states for tensor in _tensors(state).values()])


def _description(layer: Any) -> Any:
    """Return what describes the 4-bit weight of a layer; None in 8 bits. Under FSDP it is at the layer alone."""
    return getattr(layer, "quant_state", None) or getattr(layer.weight, "quant_state", None)


def _tensors(state: Any) -> dict[str, torch.Tensor]:
    inner = state.state2
    found = {"absmax": state.absmax, "code": state.code, "offset": state.offset}
    if inner is not None:
        found |= {"nested absmax": inner.absmax, "nested code": inner.code}
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def add_scales(model: nn.Module, state: dict[str, Any]) -> None:
    """Add to the state of a model what describes its 4-bit weights.

    Layers of bitsandbytes add it to their own ``state_dict()``, but torch collects parameters and buffers of sharded
    models only. Every rank has all of it.
    """
    for name, layer in quantized_layers(model):
        weight = f"{clean_name(name)}.weight" if name else "weight"
        described = _description(layer)
        if weight in state and described is not None:
            for key, value in described.as_dict(packed=True).items():
                state.setdefault(f"{weight}.{key}", value.detach().cpu())


def load_scales(model: nn.Module) -> None:
    """Let ``load_state_dict()`` load what describes 4-bit weights, too: bitsandbytes loads the packed bytes alone."""
    for _, layer in quantized_layers(model):
        if _description(layer) is not None and not hasattr(layer, _LOADS):
            setattr(layer, _LOADS, layer.register_load_state_dict_pre_hook(_take_scales))


_LOADS: Final = "_accel_loads_scales"


def _take_scales(layer: Any, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    begin = f"{prefix}weight."
    saved = {key.removeprefix(begin): value for key, value in state_dict.items() if key.startswith(begin)}
    if not saved:
        return
    own = _description(layer)
    other = type(own).from_dict(saved, device=own.absmax.device)
    mine, theirs = _tensors(own), _tensors(other)
    shapes = [{name: tensor.shape for name, tensor in found.items()} for found in (mine, theirs)]
    if shapes[0] != shapes[1] or own.blocksize != other.blocksize or own.quant_type != other.quant_type:
        raise ConfigurationError(
            f"{begin[:-1]} was saved in {other.quant_type} with blocks of {other.blocksize} weights"
            f"{' and double quantization' if other.nested else ''}, but the model has {own.quant_type} with blocks of "
            f"{own.blocksize}{' and double quantization' if own.nested else ''}. Quantize it like the saved one."
        )
    for name, tensor in mine.items():
        tensor.copy_(theirs[name])
    refresh = getattr(layer, ON_SCALES, None)
    if refresh is not None:
        refresh()


ON_SCALES: Final = "_accel_on_scales"
"""What a layer that has been sharded calls after its scales were loaded."""


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

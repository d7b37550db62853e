"""Which layers are quantized, and putting quantized ones in their place."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from accel_bigmodel.tied_params import find_tied_parameters
from accel_state.errors import ConfigurationError

from .bnb_import import bitsandbytes_nn
from .config import BnbQuantizationConfig
from .quantizers.base import Quantizer
from .quantizers.registry import QUANTIZERS


def get_keys_to_not_convert(model: nn.Module) -> list[str]:
    """Names of the modules that are better not quantized: those that share a weight, and the output layer.

    The output layer is the last child, if it is a linear layer, or if the model is one of transformers with a head on
    top of its base.
    """
    names = {name.rpartition(".")[0] for group in find_tied_parameters(model) for name in group}
    children = list(model.named_children())
    if children:
        name, last = children[-1]
        base = getattr(model, "base_model_prefix", "")
        has_head = bool(base) and hasattr(model, base) and name != base
        if isinstance(last, nn.Linear) or has_head:
            names.add(name)
    return sorted(name for name in names if name)


def layers_to_quantize(model: nn.Module, skip: Iterable[str]) -> dict[str, nn.Linear]:
    """The linear layers of a model that no name in ``skip`` excludes, by name.

    Args:
        model: the model.
        skip: names of modules, or parts of names.
    """
    skip = list(skip)
    return {
        name: module
        for name, module in model.named_modules()
        if type(module) is nn.Linear and not any(is_inside(name, part) for part in skip)
    }


def is_inside(name: str, part: str) -> bool:
    """Whether ``part`` is a module's name, or some whole parts of it: "lm_head" and "h.0" are in "model.h.0.lm_head"."""
    return f".{part}." in f".{name}."


def check_names(model: nn.Module, option: str, names: Sequence[str] | None) -> None:
    """Refuse names that no module has: a misspelled one would quantize what should not be.

    Raises:
        ConfigurationError: naming them.
    """
    modules = [name for name, _ in model.named_modules()]
    unknown = [part for part in names or () if not any(is_inside(name, part) for name in modules)]
    if unknown:
        raise ConfigurationError(
            f"{option}={list(names or ())!r}: {type(model).__name__} has no module named "
            f"{', '.join(map(repr, unknown))}. Its modules "
            f"are {', '.join(modules[1:9])}, ...; print(model) shows all of them."
        )


def replace_with_bnb_layers(
    model: nn.Module,
    bnb_quantization_config: BnbQuantizationConfig,
    modules_to_not_convert: Sequence[str] | None = None,
    current_key_name: Sequence[str] | None = None,
) -> nn.Module:
    """Put layers of bitsandbytes in place of linear ones. Their weights are quantized when they are moved to a device
    (``model.to``).

    Args:
        model: the model, on the CPU or the meta device; it is changed.
        bnb_quantization_config: how to quantize.
        modules_to_not_convert: names of modules to leave as they are, or parts of names.
        current_key_name: parts of the name of ``model`` in a larger one, which the names above count from.

    Returns:
        The model.

    Raises:
        ConfigurationError: the model has no linear layer to quantize.
    """
    quantizer = QUANTIZERS.load(bnb_quantization_config.quantizer)(bnb_quantization_config)
    prefix = ".".join(current_key_name or ())
    skip = modules_to_not_convert or ()
    found = {
        name: linear
        for name, linear in layers_to_quantize(model, ()).items()
        if not any(is_inside(f"{prefix}.{name}" if prefix else name, part) for part in skip)
    }
    check_found(model, found)
    for name, linear in found.items():
        layer = put_layer(model, name, linear, quantizer)
        parameter: Any = layer.weight
        layer._parameters["weight"] = type(parameter)(linear.weight.detach(), **_settings(parameter))
    return model


def _settings(parameter: Any) -> dict[str, Any]:
    names = ("has_fp16_weights", "compress_statistics", "quant_type", "quant_storage", "module")
    return {"requires_grad": False, **{name: getattr(parameter, name) for name in names if hasattr(parameter, name)}}


def check_found(model: nn.Module, found: dict[str, nn.Linear]) -> None:
    """Refuse a model without a linear layer that may be quantized.

    Raises:
        ConfigurationError: it has none.
    """
    if not found:
        raise ConfigurationError(
            f"{type(model).__name__} has no torch.nn.Linear layer that may be quantized: it has none, or skip_modules "
            "and "
            "keep_in_fp32_modules name them all."
        )


def put_layer(model: nn.Module, name: str, linear: nn.Linear, quantizer: Quantizer) -> nn.Linear:
    """Replace a linear layer of the model by an empty quantized one, which takes its bias over."""
    layer = quantizer.layer(linear)
    layer._parameters["bias"] = linear._parameters["bias"]
    layer.train(linear.training)
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent) if parent else model, child, layer)
    return layer


def has_4bit_bnb_layers(model: nn.Module) -> bool:
    """Whether some layer is one of bitsandbytes in 4 bits."""
    return any(isinstance(module, bitsandbytes_nn().Linear4bit) for module in model.modules())


def is_float(tensor: torch.Tensor) -> bool:
    """Whether the tensor holds floating point values in a type to compute in."""
    return tensor.is_floating_point() and tensor.element_size() >= 2

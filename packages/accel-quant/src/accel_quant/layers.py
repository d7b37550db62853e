"""Selecting the layers to quantize, and replacing them by quantized ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from accel_bigmodel.tied_params import find_tied_parameters
from accel_state.errors import ConfigurationError
from accel_state.logging import warn_once

from .config import BnbQuantizationConfig
from .quantizers.base import Quantizer, bitsandbytes_nn
from .quantizers.registry import QUANTIZERS


def get_keys_to_not_convert(model: nn.Module) -> list[str]:
    """Names of the modules that lose most when quantized: those with tied weights, and the output layer.

    The output layer is the last child, if it is a linear layer or the head of a transformers model.
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


def layers_to_quantize(model: nn.Module, skip: Iterable[str], prefix: str = "") -> dict[str, nn.Linear]:
    """The linear layers of a model by name, except those in ``skip``."""
    skipped = list(skip)
    layers = {
        name: module
        for name, module in model.named_modules()
        if type(module) is nn.Linear and not any(contains_name(f"{prefix}.{name}", part) for part in skipped)
    }
    if not layers:
        raise ConfigurationError(
            f"{type(model).__name__} has no torch.nn.Linear layer to quantize: it has none, or skip_modules and "
            "keep_in_fp32_modules name them all."
        )
    return layers


def contains_name(name: str, part: str) -> bool:
    """Whether ``part`` consists of complete components of a name: "model.h.0.lm_head" contains "lm_head" and "h.0"."""
    return f".{part}." in f".{name}."


def check_names(model: nn.Module, option: str, names: Sequence[str] | None) -> None:
    """Warn about unknown module names: misspelled, or in a list that serves several models."""
    modules = [name for name, _ in model.named_modules()]
    unknown = [part for part in names or () if not any(contains_name(name, part) for name in modules)]
    if unknown:
        warn_once(
            __name__,
            f"{option}={list(names or ())!r}: {type(model).__name__} has no module named "
            f"{', '.join(map(repr, unknown))}. Its modules are {', '.join(modules[1:9])}, ...; print(model) shows all.",
        )


def replace_with_bnb_layers(
    model: nn.Module,
    bnb_quantization_config: BnbQuantizationConfig,
    modules_to_not_convert: Sequence[str] | None = None,
    current_key_name: Sequence[str] | None = None,
) -> nn.Module:
    """Replace linear layers by those of bitsandbytes. Moving the model to a device (``model.to``) quantizes them.

    Args:
        model: the model, on the CPU or the meta device; it is changed.
        bnb_quantization_config: how to quantize.
        modules_to_not_convert: names of modules to leave unchanged, or parts of names.
        current_key_name: components of the name of ``model`` in a larger model, where those names begin.

    Raises:
        ConfigurationError: the model has no linear layer to quantize.
    """
    quantizer = QUANTIZERS.load(bnb_quantization_config.quantizer)(bnb_quantization_config)
    layers = layers_to_quantize(model, modules_to_not_convert or (), ".".join(current_key_name or ()))
    for name, linear in layers.items():
        layer = replace_layer(model, name, linear, quantizer)
        parameter: Any = layer.weight
        settings = {key: value for key, value in vars(parameter).items() if key in _PARAMETER_SETTINGS}
        layer.weight = type(parameter)(linear.weight.detach(), requires_grad=False, **settings)
    return model


_PARAMETER_SETTINGS = ("has_fp16_weights", "compress_statistics", "quant_type", "quant_storage", "module")


def replace_layer(model: nn.Module, name: str, linear: nn.Linear, quantizer: Quantizer) -> nn.Linear:
    """Replace a linear layer of the model by a quantized one with the same bias and without a weight."""
    layer = quantizer.layer(linear)
    layer.bias = linear.bias
    layer.train(linear.training)
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent) if parent else model, child, layer)
    return layer


def has_4bit_bnb_layers(model: nn.Module) -> bool:
    """Whether the model has 4-bit layers of bitsandbytes."""
    return any(isinstance(module, bitsandbytes_nn().Linear4bit) for module in model.modules())


def is_float(tensor: torch.Tensor) -> bool:
    """Whether the tensor has a floating point dtype to compute in."""
    return tensor.is_floating_point() and tensor.element_size() >= 2

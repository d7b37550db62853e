"""Selecting the layers to quantize, and replacing them by quantized ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn

from accel_bigmodel.tied_params import find_tied_parameters
from accel_state.enums import CustomDtype
from accel_state.errors import ConfigurationError
from accel_state.logging import warn_once

from .quantizers.base import Quantizer, bitsandbytes_nn
from .quantizers.registry import QUANTIZERS

_QUANT_TYPES = ("fp4", "nf4")
_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_FOR_8BIT = ("llm_int8_threshold",)
_FOR_4BIT = ("bnb_4bit_quant_type", "bnb_4bit_use_double_quant", "bnb_4bit_compute_dtype")


@dataclass
class BnbQuantizationConfig:
    """How bitsandbytes quantizes linear layers: LLM.int8() (arXiv:2208.07339) or 4-bit QLoRA (arXiv:2305.14314).

    Attributes:
        load_in_8bit: 8-bit weights, with a scale for each row.
        llm_int8_threshold: 8 bits: input columns with a larger magnitude are computed in half precision. 0: none.
        load_in_4bit: 4-bit weights, with a scale for each 64 values.
        bnb_4bit_quant_type: "fp4", or "nf4", whose 16 values suit normally distributed weights.
        bnb_4bit_use_double_quant: quantize the scales too, which saves 0.4 bits per weight.
        bnb_4bit_compute_dtype: the dtype to compute in: "fp32", "fp16", "bf16" or a torch dtype. Becomes a
            ``torch.dtype``.
        torch_dtype: the dtype of everything that is not quantized. None: float16.
        skip_modules: names, or parts of names, of modules to leave unquantized ("lm_head"). None: the output layer and
            layers tied to it.
        keep_in_fp32_modules: names, or parts of names, of modules to leave unquantized and in float32.

    Raises:
        ConfigurationError: an invalid value, or options that exclude each other.
    """

    load_in_8bit: bool = False
    llm_int8_threshold: float = 6.0
    load_in_4bit: bool = False
    bnb_4bit_quant_type: str = "fp4"
    bnb_4bit_use_double_quant: bool = False
    bnb_4bit_compute_dtype: str | torch.dtype = "fp16"
    torch_dtype: torch.dtype | str | None = None
    skip_modules: list[str] | None = None
    keep_in_fp32_modules: list[str] | None = None

    def __post_init__(self) -> None:
        for name in ("load_in_8bit", "load_in_4bit", "bnb_4bit_use_double_quant"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigurationError(f"{name}={getattr(self, name)!r} must be True or False.")
        if self.load_in_8bit == self.load_in_4bit:
            raise ConfigurationError(
                f"load_in_8bit={self.load_in_8bit} and load_in_4bit={self.load_in_4bit}: set exactly one of them to "
                "True."
            )
        threshold = self.llm_int8_threshold
        if isinstance(threshold, bool) or not isinstance(threshold, (int, float)) or not threshold >= 0:
            raise ConfigurationError(
                f"llm_int8_threshold={threshold!r} must be a number >= 0 (6.0 in the paper; 0 disables it)."
            )
        if self.bnb_4bit_quant_type not in _QUANT_TYPES:
            raise ConfigurationError(
                f"bnb_4bit_quant_type={self.bnb_4bit_quant_type!r} is not one of {', '.join(_QUANT_TYPES)}."
            )
        for name in ("skip_modules", "keep_in_fp32_modules"):
            names = () if getattr(self, name) is None else getattr(self, name)
            if not isinstance(names, (list, tuple)) or not all(isinstance(item, str) and item for item in names):
                raise ConfigurationError(f"{name}={names!r} must be a list of module names, such as ['lm_head'].")
        self.bnb_4bit_compute_dtype = _dtype("bnb_4bit_compute_dtype", self.bnb_4bit_compute_dtype)
        self.torch_dtype = torch.float16 if self.torch_dtype is None else _dtype("torch_dtype", self.torch_dtype)
        self._warn_about_unused()

    def _warn_about_unused(self) -> None:
        defaults = {field.name: field.default for field in fields(self)} | {"bnb_4bit_compute_dtype": torch.float16}
        unused = _FOR_4BIT if self.load_in_8bit else _FOR_8BIT
        given = [f"{name}={getattr(self, name)!r}" for name in unused if getattr(self, name) != defaults[name]]
        if given:
            bits, other = (8, 4) if self.load_in_8bit else (4, 8)
            text = f"{', '.join(given)} has no effect with load_in_{bits}bit, only with load_in_{other}bit."
            warn_once(__name__, text)

    @property
    def quantizer(self) -> str:
        """The registered name of the quantizer."""
        return "bnb_8bit" if self.load_in_8bit else "bnb_4bit"

    @property
    def target_dtype(self) -> torch.dtype | CustomDtype:
        """The dtype of quantized weights."""
        return torch.int8 if self.load_in_8bit else CustomDtype.INT4


def _dtype(name: str, value: Any) -> torch.dtype:
    dtype = _DTYPES.get(value, getattr(torch, value.removeprefix("torch."), None)) if isinstance(value, str) else value
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point or dtype.itemsize < 2:
        raise ConfigurationError(
            f"{name}={value!r} is not a dtype to compute in. Give 'fp32', 'fp16', 'bf16' or a torch dtype such as "
            "torch.bfloat16."
        )
    return dtype


def get_keys_to_not_convert(model: nn.Module) -> list[str]:
    """Return the names of the modules that lose most when quantized: those with tied weights, and the output layer.

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
    """Return the linear layers of a model by name, except those in ``skip``."""
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
    """Return True if ``part`` is complete components of a name: "model.h.0.lm_head" contains "lm_head" and "h.0"."""
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
    """Return True if the model has 4-bit layers of bitsandbytes."""
    return any(isinstance(module, bitsandbytes_nn().Linear4bit) for module in model.modules())


def is_float(tensor: torch.Tensor) -> bool:
    """Return True if the tensor has a floating point dtype to compute in."""
    return tensor.is_floating_point() and tensor.element_size() >= 2

"""Configuration of bitsandbytes quantization."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch

from accel_state.enums import CustomDtype
from accel_state.errors import ConfigurationError
from accel_state.logging import warn_once

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

"""What to quantize, and how."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields
from typing import Any

import torch

from accel_state.enums import CustomDtype
from accel_state.errors import ConfigurationError

_QUANT_TYPES = ("fp4", "nf4")
_SHORT = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_FOR_8BIT = ("llm_int8_threshold",)
_FOR_4BIT = ("bnb_4bit_quant_type", "bnb_4bit_use_double_quant", "bnb_4bit_compute_dtype")


@dataclass
class BnbQuantizationConfig:
    """How bitsandbytes quantizes the linear layers of a model: in 8 bits (LLM.int8(), arXiv:2208.07339) or 4 (QLoRA,
    arXiv:2305.14314).

    Attributes:
        load_in_8bit: weights in 8 bits, with a scale for each row.
        llm_int8_threshold: in 8 bits, columns of the input in which a value is larger than this are computed in half
            precision. 0 computes all in 8 bits.
        load_in_4bit: weights in 4 bits, with a scale for each 64 values.
        bnb_4bit_quant_type: "fp4", or "nf4", whose 16 values suit weights that are normally distributed.
        bnb_4bit_use_double_quant: quantize the scales too: 0.4 bits less for each weight.
        bnb_4bit_compute_dtype: the type to compute in: "fp32", "fp16", "bf16", or a torch type. Becomes a
            ``torch.dtype``.
        torch_dtype: the type of everything that is not quantized. None is float16.
        skip_modules: modules that are not quantized, by name or a part of it ("lm_head"). None takes the output layer
            and layers that share their weight.
        keep_in_fp32_modules: modules that are not quantized and kept in float32, by name or a part of it.

    Raises:
        ConfigurationError: a value that is not allowed, or options that do not go together.
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
            _check_flag(name, getattr(self, name))
        self._check_bits()
        self._check_values()
        self.bnb_4bit_compute_dtype = _dtype("bnb_4bit_compute_dtype", self.bnb_4bit_compute_dtype)
        self.torch_dtype = torch.float16 if self.torch_dtype is None else _dtype("torch_dtype", self.torch_dtype)
        for name in ("skip_modules", "keep_in_fp32_modules"):
            _check_names(name, getattr(self, name))

    @property
    def quantizer(self) -> str:
        """The registered name of what quantizes a layer."""
        return "bnb_8bit" if self.load_in_8bit else "bnb_4bit"

    @property
    def target_dtype(self) -> torch.dtype | CustomDtype:
        """The type of quantized weights."""
        return torch.int8 if self.load_in_8bit else CustomDtype.INT4

    def _check_bits(self) -> None:
        if self.load_in_8bit == self.load_in_4bit:
            raise ConfigurationError(
                f"load_in_8bit={self.load_in_8bit} and load_in_4bit={self.load_in_4bit}: set exactly one of them to "
                "True."
            )
        idle = _FOR_4BIT if self.load_in_8bit else _FOR_8BIT
        given = [f"{name}={getattr(self, name)!r}" for name in idle if not _is_default(self, name)]
        if given:
            bits, other = (8, 4) if self.load_in_8bit else (4, 8)
            raise ConfigurationError(
                f"{', '.join(given)} has no effect with load_in_{bits}bit. Leave it out, or set load_in_{other}bit."
            )

    def _check_values(self) -> None:
        threshold = self.llm_int8_threshold
        if isinstance(threshold, bool) or not isinstance(threshold, (int, float)) or not threshold >= 0:
            raise ConfigurationError(
                f"llm_int8_threshold={threshold!r} must be a number, 0 or more (the paper takes 6.0, 0 switches it "
                "off)."
            )
        if self.bnb_4bit_quant_type not in _QUANT_TYPES:
            raise ConfigurationError(
                f"bnb_4bit_quant_type={self.bnb_4bit_quant_type!r} is not one of {', '.join(_QUANT_TYPES)}."
            )


def _is_default(config: BnbQuantizationConfig, name: str) -> bool:
    default = next(field.default for field in fields(config) if field.name == name)
    value: Any = getattr(config, name)
    return default is not MISSING and bool(
        value == default or (name == "bnb_4bit_compute_dtype" and value == torch.float16)
    )


def _check_flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ConfigurationError(f"{name}={value!r} must be True or False.")


def _dtype(name: str, value: Any) -> torch.dtype:
    dtype = _SHORT.get(value, getattr(torch, value.removeprefix("torch."), None)) if isinstance(value, str) else value
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point or dtype.itemsize < 2:
        raise ConfigurationError(
            f"{name}={value!r} is not a type to compute in. Give 'fp32', 'fp16', 'bf16' or a torch type such as "
            "torch.bfloat16."
        )
    return dtype


def _check_names(name: str, value: Any) -> None:
    if value is not None and not (
        isinstance(value, (list, tuple)) and all(isinstance(item, str) and item for item in value)
    ):
        raise ConfigurationError(f"{name}={value!r} must be a list of names of modules, such as ['lm_head'].")

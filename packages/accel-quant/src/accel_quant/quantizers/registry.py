"""Registered quantization methods; the entry point group ``accel.quantizers`` adds others."""

from __future__ import annotations

from accel_state.registry import Registry

from .base import Quantizer

QUANTIZERS: Registry[type[Quantizer]] = Registry(
    "quantizer",
    {"bnb_8bit": "accel_quant.quantizers.bnb_8bit:Bnb8Bit", "bnb_4bit": "accel_quant.quantizers.bnb_4bit:Bnb4Bit"},
    "accel.quantizers",
)

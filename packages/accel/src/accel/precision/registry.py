"""The precisions, by the names that ``mixed_precision`` takes."""

from __future__ import annotations

from accel_state.registry import Registry

from .full import Precision

PRECISIONS: Registry[type[Precision]] = Registry(
    "precision",
    {
        "no": "accel.precision.full:Precision",
        "fp16": "accel.precision.amp:Float16",
        "bf16": "accel.precision.amp:BFloat16",
        "fp8": "accel.precision.fp8:FP8",
    },
    entry_point_group="accel.precision",
)

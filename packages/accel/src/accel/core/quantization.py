"""Names of accel-quant (the extra ``quant``), imported when first used."""

from __future__ import annotations

from typing import Any

from accel_state.errors import require

_NAMES = (
    "BnbQuantizationConfig",
    "get_keys_to_not_convert",
    "has_4bit_bnb_layers",
    "load_and_quantize_model",
    "replace_with_bnb_layers",
)


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(require("accel_quant", purpose=f"accel.utils.{name}", install="accel[quant]"), name)

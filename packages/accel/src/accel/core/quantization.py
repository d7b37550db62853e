"""Names of accel-quant (the extra ``quant``), imported when first used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .deferred import names_of_extra

__getattr__: Callable[[str], Any] = names_of_extra(
    __name__,
    "accel_quant",
    "quant",
    (
        "BnbQuantizationConfig",
        "get_keys_to_not_convert",
        "has_4bit_bnb_layers",
        "load_and_quantize_model",
        "replace_with_bnb_layers",
    ),
)

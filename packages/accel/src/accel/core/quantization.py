"""Names of accel-quant (the extra ``quant``), imported when first used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .deferred import names_of_extra

__getattr__: Callable[[str], Any] = names_of_extra(__name__, "accel_quant", "quant")

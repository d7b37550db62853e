"""Getting bitsandbytes."""

from __future__ import annotations

import functools
from typing import Any

from accel_state.errors import require


@functools.cache
def bitsandbytes_nn() -> Any:
    """``bitsandbytes.nn``.

    Raises:
        MissingDependencyError: bitsandbytes is not installed.
    """
    return require("bitsandbytes", purpose="BnbQuantizationConfig", install="bitsandbytes").nn

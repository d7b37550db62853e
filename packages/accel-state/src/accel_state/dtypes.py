"""Sizes of element types."""

from __future__ import annotations

import torch

from .enums import CustomDtype
from .errors import ArgumentTypeError

_CUSTOM_BYTES = {CustomDtype.INT2: 0.25, CustomDtype.INT4: 0.5, CustomDtype.FP8: 1.0}


def dtype_byte_size(dtype: torch.dtype | CustomDtype) -> float:
    """Return bytes per element; a bool counts as one bit, as in size estimates of packed models.

    Raises:
        ArgumentTypeError: neither a torch dtype nor a CustomDtype.
    """
    if dtype is torch.bool:
        return 1 / 8
    if isinstance(dtype, torch.dtype):
        return dtype.itemsize
    if isinstance(dtype, CustomDtype):
        return _CUSTOM_BYTES[dtype]
    raise ArgumentTypeError(f"{dtype!r} is not a dtype. Pass a torch.dtype or a CustomDtype.")

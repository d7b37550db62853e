"""Facts about element types."""

from __future__ import annotations

import torch

from .enums import CustomDtype

_CUSTOM_BYTES = {CustomDtype.INT2: 0.25, CustomDtype.INT4: 0.5, CustomDtype.FP8: 1.0}


def dtype_byte_size(dtype: torch.dtype | CustomDtype) -> float:
    """Bytes that an element needs; bools count as the one bit that they hold, as in size estimates of packed models.

    Raises:
        TypeError: neither a torch dtype nor a CustomDtype.
    """
    if dtype is torch.bool:
        return 1 / 8
    if isinstance(dtype, torch.dtype):
        return dtype.itemsize
    if isinstance(dtype, CustomDtype):
        return _CUSTOM_BYTES[dtype]
    raise TypeError(f"{dtype!r} is not an element type. Pass a torch.dtype or a CustomDtype.")

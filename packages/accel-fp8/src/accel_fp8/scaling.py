"""From values to 8-bit values and the scales that bring them back."""

from __future__ import annotations

import torch
from torch import Tensor

from .formats import BY_DTYPE

SMALLEST_AMAX = 2.0**-100
"""Tensors whose largest value is below this are scaled as if it were this: the scale and its inverse stay normal
float32 numbers.
"""


def largest_value(x: Tensor) -> Tensor:
    """The largest absolute value of a tensor, as a float32 scalar; not finite if any element is not."""
    return x.detach().abs().amax().float()


def largest_of_rows(x: Tensor) -> Tensor:
    """The largest absolute value of each row of shape (M, K), as float32 of shape (M, 1)."""
    return x.detach().abs().amax(dim=1, keepdim=True).float()


def scale_for(amax: Tensor, dtype: torch.dtype, margin: int = 0) -> Tensor:
    """What brings the largest value to the end of a format: ``largest / amax / 2**margin``.

    A largest value that is not finite gives a scale of 0 or NaN. Everything computed with it is NaN, so that an
    overflow shows in the result as it does in any other precision.

    Args:
        amax: largest absolute values, float32.
        dtype: the 8-bit type.
        margin: powers of two of room that are left above them.
    """
    return BY_DTYPE[dtype].largest / amax.clamp(min=SMALLEST_AMAX) * 2.0**-margin


def delayed_scale(stored: Tensor, amax: Tensor, dtype: torch.dtype, margin: int) -> Tensor:
    """The stored scale; that of the tensor itself where nothing is stored yet, or where it holds what is not finite."""
    usable = (stored > 0) & torch.isfinite(amax)
    return torch.where(usable, stored, scale_for(amax, dtype, margin))


def quantize(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """``x * scale`` in 8 bits, rounded to nearest even. What is beyond the format becomes its largest value, and NaN
    stays NaN.
    """
    largest = BY_DTYPE[dtype].largest
    return (x.float() * scale).clamp(-largest, largest).to(dtype)

"""Quantization to 8 bits and the scales it uses."""

from __future__ import annotations

import torch
from torch import Tensor

from .formats import BY_DTYPE

# Lower limit of largest values, so that a scale and its inverse are normal float32 numbers.
SMALLEST_AMAX = 2.0**-100


def largest_value(x: Tensor) -> Tensor:
    """The largest absolute value of a tensor, as a float32 scalar; not finite if an element is not."""
    return x.detach().abs().amax().float()


def largest_of_rows(x: Tensor) -> Tensor:
    """The largest absolute value of each row of shape (M, K), as float32 of shape (M, 1)."""
    return x.detach().abs().amax(dim=1, keepdim=True).float()


def scale_for(amax: Tensor, dtype: torch.dtype, margin: int = 0) -> Tensor:
    """The scale that maps ``amax`` to the largest value of a format: ``largest / amax / 2**margin``.

    The scale for a value that is not finite is 0 or NaN, and makes all results NaN, so that overflows are as visible as
    in other precisions.
    """
    return BY_DTYPE[dtype].largest / amax.clamp(min=SMALLEST_AMAX) * 2.0**-margin


def delayed_scale(stored: Tensor, amax: Tensor, dtype: torch.dtype, margin: int) -> Tensor:
    """The stored scale; that of ``amax`` if none is stored yet, or if ``amax`` is not finite."""
    usable = (stored > 0) & torch.isfinite(amax)
    return torch.where(usable, stored, scale_for(amax, dtype, margin))


def quantize(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """``x * scale`` in 8 bits, rounded to nearest even, saturated to the largest value; NaN stays NaN."""
    largest = BY_DTYPE[dtype].largest
    return (x.float() * scale).clamp(-largest, largest).to(dtype)

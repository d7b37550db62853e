"""8-bit formats, quantization and the scales it uses."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Float8Format:
    """An 8-bit format.

    Attributes:
        dtype: the torch dtype.
        largest: largest finite value.
        unit_roundoff: largest relative error of rounding a normal number to nearest.
        underflow: largest absolute error of rounding a subnormal number: half of the smallest one.
    """

    dtype: torch.dtype
    largest: float
    unit_roundoff: float
    underflow: float


E4M3 = Float8Format(torch.float8_e4m3fn, largest=448.0, unit_roundoff=2.0**-4, underflow=2.0**-10)
"""4 bits of exponent, 3 of mantissa, no infinity: for weights and activations."""
E5M2 = Float8Format(torch.float8_e5m2, largest=57344.0, unit_roundoff=2.0**-3, underflow=2.0**-17)
"""5 bits of exponent, 2 of mantissa: more range and less precision, for gradients."""

BY_DTYPE = {fmt.dtype: fmt for fmt in (E4M3, E5M2)}


def rounding_error_bound(x: Tensor, scale: Tensor | float, fmt: Float8Format) -> Tensor:
    """Elementwise bound of the quantization error ``|x - q(x)|``, in units of ``x``.

    ``|x - q(x)| <= max(u |x|, d / s)``, with u the unit roundoff and d the underflow of the format and s the scale, for
    all ``|x| s`` up to the largest value. Multiplying by the scale in float32 adds a relative rounding error of at most
    2**-23.

    Args:
        x: the exact values.
        scale: factor before rounding; broadcasts against ``x``.
        fmt: the format.
    """
    x = x.double().abs()
    scale = torch.as_tensor(scale, dtype=torch.float64)
    return torch.maximum((fmt.unit_roundoff + 2.0**-20) * x, (1 + 2.0**-20) * fmt.underflow / scale)


def matmul_error_bound(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor | float,
    scale_b: Tensor | float,
    formats: tuple[Float8Format, Float8Format],
    out_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Elementwise bound of ``|q(a) @ q(b) - a @ b|``, where q quantizes with a scale.

    With the elementwise bounds e_a and e_b of :func:`rounding_error_bound`, the triangle inequality gives
    ``|q(a) q(b) - a b| <= e_a |b| + |a| e_b + e_a e_b`` (matrix products). Accumulating K products in float32 adds at
    most ``K 2**-22 (|a| + e_a)(|b| + e_b)`` (Higham, Accuracy and Stability of Numerical Algorithms, section 3.5, with
    a margin for hardware that does not accumulate in order), and rounding to ``out_dtype`` half a unit in the last
    place.

    Args:
        a: shape (M, K).
        b: shape (K, N).
        scale_a: scale of ``a``; broadcasts against it.
        scale_b: scale of ``b``; broadcasts against it.
        formats: formats of ``a`` and ``b``.
        out_dtype: dtype of the result.

    Returns:
        float64 of shape (M, N).
    """
    size_a, size_b = a.double().abs(), b.double().abs()
    error_a, error_b = rounding_error_bound(a, scale_a, formats[0]), rounding_error_bound(b, scale_b, formats[1])
    quantization = error_a @ size_b + size_a @ error_b + error_a @ error_b
    largest = (size_a + error_a) @ (size_b + error_b)
    finfo = torch.finfo(out_dtype)
    return quantization + largest * (a.shape[-1] * 2.0**-22 + finfo.eps) + finfo.tiny


# Lower limit of largest values, so that a scale and its inverse are normal float32 numbers.
SMALLEST_AMAX = 2.0**-100


def largest_value(x: Tensor) -> Tensor:
    """Return the largest absolute value of a tensor, as a float32 scalar; not finite if an element is not."""
    return x.detach().abs().amax().float()


def largest_of_rows(x: Tensor) -> Tensor:
    """Return the largest absolute value of each row of shape (M, K), as float32 of shape (M, 1)."""
    return x.detach().abs().amax(dim=1, keepdim=True).float()


def scale_for(amax: Tensor, dtype: torch.dtype, margin: int = 0) -> Tensor:
    """Return the scale that maps ``amax`` to the largest value of a format: ``largest / amax / 2**margin``.

    The scale for a value that is not finite is 0 or NaN, and makes all results NaN, so that overflows are as visible as
    in other precisions.
    """
    return BY_DTYPE[dtype].largest / amax.clamp(min=SMALLEST_AMAX) * 2.0**-margin


def delayed_scale(stored: Tensor, amax: Tensor, dtype: torch.dtype, margin: int) -> Tensor:
    """Return the stored scale; that of ``amax`` if none is stored yet, or if ``amax`` is not finite."""
    usable = (stored > 0) & torch.isfinite(amax)
    return torch.where(usable, stored, scale_for(amax, dtype, margin))


def quantize(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """``x * scale`` in 8 bits, rounded to nearest even, saturated to the largest value; NaN stays NaN."""
    largest = BY_DTYPE[dtype].largest
    return (x.float() * scale).clamp(-largest, largest).to(dtype)

"""Product of two 8-bit matrices, in hardware where the device supports it."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ._torch_compat import constant_result, scaled_mm

# Dtypes of results that the hardware instruction returns.
_DIRECT = (torch.float32, torch.bfloat16, torch.float16)
# FP8 hardware requires dimensions that are multiples of this.
MULTIPLE = 16


@constant_result
def has_instruction(device: str, left: torch.dtype, right: torch.dtype, out_dtype: torch.dtype, rowwise: bool) -> bool:
    """Return True if a device multiplies these dtypes with ``torch._scaled_mm``. Tried once, with small matrices.

    CPUs do not: torch's kernels for them convert the values, and take 10 to 200 times as long as a product of float32.
    """
    return _try_instruction(device, left, right, out_dtype, rowwise)


@functools.cache
def _try_instruction(device: str, left: torch.dtype, right: torch.dtype, out_dtype: torch.dtype, rowwise: bool) -> bool:
    if torch.device(device).type == "cpu":
        return False
    ones = torch.ones(MULTIPLE, MULTIPLE, device=device)
    scale = torch.ones(MULTIPLE, 1, device=device) if rowwise else torch.ones((), device=device)
    try:
        result = scaled_mm(ones.to(left), ones.to(right).t(), scale_a=scale, scale_b=scale.t(), out_dtype=out_dtype)
        return bool((result == MULTIPLE).all())
    except (RuntimeError, NotImplementedError, ValueError, AttributeError):
        return False  # devices and torch versions without it raise different errors


def computes_in_8_bits(device: torch.device) -> bool:
    """Return True if a device multiplies 8-bit matrices; elsewhere their values are multiplied in a wider dtype."""
    return bool(has_instruction(str(device), torch.float8_e4m3fn, torch.float8_e4m3fn, torch.bfloat16, False))


def multiply(
    a: Tensor, b: Tensor, inverse_a: Tensor, inverse_b: Tensor, out_dtype: torch.dtype, fast: bool = False
) -> Tensor:
    """Compute ``(a * inverse_a) @ (b * inverse_b).T``.

    Args:
        a: 8-bit, of shape (M, K).
        b: 8-bit, of shape (N, K).
        inverse_a: inverse scale of ``a``: float32, a scalar or of shape (M, 1).
        inverse_b: inverse scale of ``b``: float32, a scalar or of shape (N, 1).
        out_dtype: dtype of the result.
        fast: allow the hardware to accumulate with fewer bits.

    Returns:
        A tensor of shape (M, N).
    """
    # With rowwise scales, GPUs return bfloat16 only.
    for dtype in (out_dtype if out_dtype in _DIRECT else torch.float32, torch.bfloat16):
        if a.numel() and b.numel() and has_instruction(str(a.device), a.dtype, b.dtype, dtype, inverse_a.dim() == 2):
            left, right = _padded(a).contiguous(), _padded(b).contiguous().t()
            scales = {"scale_a": inverse_a, "scale_b": inverse_b.t()}
            return _converted(scaled_mm(left, right, **scales, out_dtype=dtype, use_fast_accum=fast), out_dtype)
    return _in_wider_dtype(a, b, inverse_a, inverse_b, out_dtype)


def _in_wider_dtype(a: Tensor, b: Tensor, inverse_a: Tensor, inverse_b: Tensor, out_dtype: torch.dtype) -> Tensor:
    # bfloat16 represents every 8-bit value exactly; the range of float16 is too small for their sums.
    wide = torch.bfloat16 if out_dtype is torch.bfloat16 else torch.float32
    product = (a.to(wide) @ b.to(wide).t()).float()
    return _converted(product * inverse_a * inverse_b.t(), out_dtype)


def _converted(result: Tensor, dtype: torch.dtype) -> Tensor:
    # A conversion that changes nothing must not be the last operation of a forward pass: under torch.compile, torch
    # 2.11 then gives no gradient to the inputs of the autograd function.
    return result if result.dtype is dtype else result.to(dtype)


def _padded(x: Tensor) -> Tensor:
    """Pad the rows with zeros to a multiple of 16, which changes no product."""
    missing = -x.shape[1] % MULTIPLE
    if not missing:
        return x
    # Some devices cannot pad 8-bit floats. A zero byte is 0.0 in both formats.
    return torch.nn.functional.pad(x.view(torch.uint8), (0, missing)).view(x.dtype)

"""One product of two 8-bit matrices, by the hardware's own instruction where there is one."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

_DIRECT = (torch.float32, torch.bfloat16, torch.float16)
MULTIPLE = 16
"""Dimensions that hardware multiplies in 8 bits are multiples of this."""


def has_instruction(device: str, left: torch.dtype, right: torch.dtype, out_dtype: torch.dtype, rowwise: bool) -> bool:
    """Whether ``torch._scaled_mm`` multiplies these types on a device. Tried once, with two small matrices.

    Args:
        device: "cuda:0".
        left: type of the first matrix.
        right: type of the second one.
        out_dtype: type of the result.
        rowwise: whether each row has a scale of its own.
    """
    return _try_instruction(device, left, right, out_dtype, rowwise)


# What torch.compiler.assume_constant_result does: the compiler calls it while it traces, and takes the answer as a
# constant. That # function imports the compiler, which importing this module must not.
has_instruction._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.cache
def _try_instruction(device: str, left: torch.dtype, right: torch.dtype, out_dtype: torch.dtype, rowwise: bool) -> bool:
    ones = torch.ones(MULTIPLE, MULTIPLE, device=device)
    scale = torch.ones(MULTIPLE, 1, device=device) if rowwise else torch.ones((), device=device)
    try:
        result = torch._scaled_mm(
            ones.to(left), ones.to(right).t(), scale_a=scale, scale_b=scale.t(), out_dtype=out_dtype
        )
        return bool((result == MULTIPLE).all())
    except (RuntimeError, NotImplementedError, ValueError, AttributeError):
        return False  # what a device or a torch without it says differs


def computes_in_8_bits(device: torch.device) -> bool:
    """Whether a device multiplies 8-bit matrices by itself; elsewhere their values are multiplied in a wider type."""
    return bool(has_instruction(str(device), torch.float8_e4m3fn, torch.float8_e4m3fn, torch.bfloat16, False))


def multiply(
    a: Tensor, b: Tensor, inverse_a: Tensor, inverse_b: Tensor, out_dtype: torch.dtype, fast: bool = False
) -> Tensor:
    """``(a * inverse_a) @ (b * inverse_b).T``.

    Args:
        a: 8-bit, of shape (M, K).
        b: 8-bit, of shape (N, K).
        inverse_a: inverse scale of ``a``: float32, a scalar or of shape (M, 1).
        inverse_b: inverse scale of ``b``: float32, a scalar or of shape (N, 1).
        out_dtype: type of the result.
        fast: let the hardware add up with fewer bits, where it can choose.

    Returns:
        A tensor of shape (M, N).
    """
    computed = _instruction_dtype(a, b, out_dtype, rowwise=inverse_a.dim() == 2)
    if computed is None or not a.numel() or not b.numel():
        return _in_wider_type(a, b, inverse_a, inverse_b, out_dtype)
    a, b = _padded(a).contiguous(), _padded(b).contiguous()
    result = torch._scaled_mm(
        a, b.t(), scale_a=inverse_a, scale_b=inverse_b.t(), out_dtype=computed, use_fast_accum=fast
    )
    return result.to(out_dtype)


def _instruction_dtype(a: Tensor, b: Tensor, out_dtype: torch.dtype, rowwise: bool) -> torch.dtype | None:
    """The type to ask the hardware for; None where it does not multiply these matrices."""
    # With scales for rows, GPUs give bfloat16 only.
    for dtype in (out_dtype if out_dtype in _DIRECT else torch.float32, torch.bfloat16):
        if has_instruction(str(a.device), a.dtype, b.dtype, dtype, rowwise):
            return dtype
    return None


def _in_wider_type(a: Tensor, b: Tensor, inverse_a: Tensor, inverse_b: Tensor, out_dtype: torch.dtype) -> Tensor:
    # bfloat16 holds every 8-bit value exactly; float16 has not the range for their sums.
    wide = torch.bfloat16 if out_dtype is torch.bfloat16 else torch.float32
    product = (a.to(wide) @ b.to(wide).t()).float()
    return (product * inverse_a * inverse_b.t()).to(out_dtype)


def _padded(x: Tensor) -> Tensor:
    """Zeros added to the rows up to a multiple of 16; they change no product."""
    missing = -x.shape[1] % MULTIPLE
    if not missing:
        return x
    # Not every device pads 8-bit floats. A byte of zeros is 0.0 in both formats.
    return torch.nn.functional.pad(x.view(torch.uint8), (0, missing)).view(x.dtype)

"""Where weights begin in memory, and when that shows in results.

Arithmetic libraries choose their way by the address of the data, and the last bits of a result depend on the way. torch
puts its own tensors at multiples of 64 bytes; a tensor that is mapped from a file begins wherever the file's header
ends. Measured with torch 2.13 and MKL: products of float32 matrices are the same wherever their weights lie as long as
the input has several rows; products with vectors, convolutions of few positions, recurrent cells and everything in
float64 are not; half precision is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

ALIGNMENT = 64
"""Bytes; that of torch's own tensors."""
SMALL = 64 * 1024
"""Bytes; what is smaller is copied without asking, as that takes no time."""

HALF = frozenset({torch.float16, torch.bfloat16})
_TABLES = (nn.Embedding, nn.EmbeddingBag)


def is_aligned(value: torch.Tensor) -> bool:
    """Whether a tensor begins where torch's own would."""
    return value.device.type != "cpu" or value.data_ptr() % ALIGNMENT == 0


def aligned(value: torch.Tensor) -> torch.Tensor:
    """The tensor, copied where it does not begin as torch's own would."""
    return value if is_aligned(value) else value.clone(memory_format=torch.contiguous_format)


def settled(value: torch.Tensor) -> torch.Tensor:
    """The tensor, copied where it is small and does not begin as torch's own would."""
    return aligned(value) if value.numel() * value.element_size() < SMALL else value


def indifferent(module: nn.Module, dtype: torch.dtype) -> bool:
    """Whether results of a module are the same wherever its large weights lie, for inputs of several rows."""
    if dtype in HALF or not dtype.is_floating_point or isinstance(module, _TABLES):
        return True
    return dtype is torch.float32 and is_product(module)


def is_product(module: nn.Module) -> bool:
    """Whether a module multiplies its input with its weight, and does nothing else with it."""
    return (
        type(module) is nn.Linear or type(module).__name__ == "Conv1D"
    )  # transformers' linear layer with a transposed weight


def single_row(args: tuple[Any, ...]) -> bool:
    """Whether a product's input may be a single vector."""
    first = args[0] if args else None
    return not isinstance(first, torch.Tensor) or first.dim() < 2 or first.numel() <= first.shape[-1]


def align_when_called(module: nn.Module) -> None:
    """Let a module copy its weights to where torch would put them, at its first forward whose result could depend on
    it.
    """
    if _align not in module._forward_pre_hooks.values():
        module.register_forward_pre_hook(_align)


def _align(module: nn.Module, args: tuple[Any, ...]) -> None:
    if torch.compiler.is_compiling() or (is_product(module) and not single_row(args)):
        return
    for parameter in [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
        if not is_aligned(parameter):
            parameter.data = aligned(parameter.data)
    for key, hook in list(module._forward_pre_hooks.items()):
        if hook is _align:
            del module._forward_pre_hooks[key]

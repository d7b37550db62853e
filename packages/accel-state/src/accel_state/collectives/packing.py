"""Packs small tensors into one message, since the latency of a message exceeds its transfer time.

Gather and broadcast only move bytes, so tensors of all dtypes share one uint8 buffer, including dtypes that a backend
does not support, such as bool or float8. Reductions pack tensors of the same dtype.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

# Reinterpreting bytes as another dtype requires its alignment; 16 bytes suffice for complex128.
_ALIGNMENT = 16
# Above this size, copying into the buffer costs more than a separate message.
SMALL_BYTES = 1 << 18


def nbytes(tensor: torch.Tensor) -> int:
    """Size of the tensor's values in bytes."""
    return tensor.numel() * tensor.element_size()


def split_small(tensors: Sequence[torch.Tensor]) -> tuple[list[int], list[int]]:
    """Positions of the tensors to pack, and of those to send separately; empty tensors are in neither."""
    small = [i for i, tensor in enumerate(tensors) if 0 < nbytes(tensor) <= SMALL_BYTES]
    large = [i for i, tensor in enumerate(tensors) if nbytes(tensor) > SMALL_BYTES]
    if len(small) == 1:
        return [], sorted(large + small)
    return small, large


class ByteLayout:
    """The byte range of each tensor in a buffer, equal on all ranks for equal shapes and dtypes."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self.spans: list[tuple[int, int]] = []
        end = 0
        for tensor in tensors:
            start = -(-end // _ALIGNMENT) * _ALIGNMENT
            end = start + nbytes(tensor)
            self.spans.append((start, end))
        self.total: int = -(-end // _ALIGNMENT) * _ALIGNMENT

    def pack(self, tensors: Sequence[torch.Tensor], size: int | None = None) -> torch.Tensor:
        """Copy the tensors into one uint8 tensor of ``size`` bytes, by default ``total``."""
        device = tensors[0].device if tensors else None
        buffer = torch.empty(self.total if size is None else size, dtype=torch.uint8, device=device)
        for tensor, (start, end) in zip(tensors, self.spans, strict=True):
            buffer[start:end].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        return buffer

    def unpack(self, buffer: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Split a buffer of shape ``(..., total)`` into tensors of shapes ``(..., *like[i].shape)``."""
        leading = buffer.shape[:-1]
        return [
            buffer[..., start:end].contiguous().view(tensor.dtype).view((*leading, *tensor.shape))
            for tensor, (start, end) in zip(like, self.spans, strict=True)
        ]


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a flat uint8 view of a contiguous tensor."""
    return tensor.reshape(-1).view(torch.uint8)


def groups_by_dtype(tensors: Sequence[torch.Tensor], positions: Iterable[int]) -> list[list[int]]:
    """Positions of tensors with the same dtype, which can be reduced as one."""
    groups: dict[torch.dtype, list[int]] = {}
    for i in positions:
        groups.setdefault(tensors[i].dtype, []).append(i)
    return list(groups.values())

"""Fake tensors in place of tensors that a rank does not read: they have a shape, and use neither memory nor time."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence

import torch

from .._torch_compat import FakeTensor, FakeTensorMode, is_untouched


def fake_mode() -> FakeTensorMode:
    """Return the active FakeTensorMode, or one for all stages: tensors of different modes cannot be mixed."""
    probe = torch.empty(0)
    return probe.fake_mode if isinstance(probe, FakeTensor) else _own_mode()


@functools.cache
def _own_mode() -> FakeTensorMode:
    return FakeTensorMode(allow_non_fake_inputs=True)


class StandIns:
    """Makes fake tensors, and keeps them for the next micro-batch, since they are slow to make.

    Args:
        device: where the tensors would be.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._mode = fake_mode()
        self._made: dict[Hashable, torch.Tensor] = {}
        # In a FakeTensorMode of the caller, those that are kept would look like memory.
        self._keeps = not isinstance(torch.empty(0), FakeTensor)

    def get(self, key: Hashable, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return the fake tensor last made for ``key``, or a new one if the model's code has changed that in place."""
        kept = self._made.get(key)
        if kept is not None and is_untouched(kept) and (kept.shape, kept.dtype) == (shape, dtype):
            return kept
        with self._mode:
            made = torch.empty(shape, dtype=dtype, device=self._device)
        if self._keeps and not made.is_inference():
            self._made[key] = made
        return made

    def narrow(self, tensor: torch.Tensor, start: int, size: int) -> torch.Tensor:
        """``size`` samples of an input, from ``start`` on."""
        if not isinstance(tensor, FakeTensor):
            return tensor.narrow(0, start, size)
        shape = torch.Size((size, *tensor.shape[1:]))
        return self.get((shape, tensor.dtype), shape, tensor.dtype)

"""The first calls of a model in data parallel training."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch

from accel_state.logging import warn_once

from .._torch_compat import default_store


class FirstCalls:
    """The first calls of a model on several processes; on ranks 0 and 1 it compares their first batches."""

    LIMIT = 4

    def __init__(self, rank: int) -> None:
        self.count: int = 0
        self._rank = rank
        self._key = ""
        self._digest = ""

    def next(self, inputs: Sequence[Any]) -> bool:
        """Count a call; False when there is nothing left to do."""
        self.count += 1
        if self._rank > 1:
            return False
        if self.count == 1:
            self._digest = _digest(inputs)
            if not self._digest:
                return False
            store = default_store()
            self._key = f"accel/first_batch/{store.add(f'accel/first_batches/{self._rank}', 1)}"
            store.set(f"{self._key}/{self._rank}", self._digest)
            return self._rank == 0
        other, store = f"{self._key}/1", default_store()
        if not store.check([other]):
            return self.count < self.LIMIT
        if store.get(other).decode() == self._digest:
            warn_once(
                __name__,
                "the first batch of rank 0 and rank 1 is the same, so the processes repeat each other's work. Pass the "
                "DataLoader to prepare(), and loop over what it returns; seed random inputs differently on each rank: "
                "set_seed(seed, device_specific=True).",
            )
        return False


def _digest(inputs: Sequence[Any]) -> str:
    """Return a digest of a sample of the values of each tensor in a call's arguments; empty without tensors."""
    digest, count = hashlib.sha256(), 0
    for value in inputs:
        if type(value) is torch.Tensor and value.layout is torch.strided and not value.is_nested and value.numel():
            flat = value.detach().reshape(-1)
            sample = flat[:: max(1, len(flat) // 4096)].contiguous().view(torch.uint8)
            digest.update(sample.cpu().numpy().tobytes())
            count += 1
    return digest.hexdigest() if count else ""

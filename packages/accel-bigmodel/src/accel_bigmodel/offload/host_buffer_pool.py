"""Memory that is used again and again for weights that come and go."""

from __future__ import annotations

import threading
import weakref
from collections import deque

import numpy as np
import torch

from .alignment import ALIGNMENT


class BufferPool:
    """Aligned host memory, handed out as tensors of bytes.

    A buffer comes back by itself when the last tensor over it is gone, whoever holds it. Fresh memory would cost more
    than the copy into it: the system clears every page of it first.

    Args:
        largest_reserve: bytes that are kept while nobody uses them.
    """

    def __init__(self, largest_reserve: int) -> None:
        self.largest_reserve = largest_reserve
        self._idle: deque[np.ndarray[tuple[int], np.dtype[np.uint8]]] = deque()
        # Buffers come back when the collector runs, which may be in the middle of the pool's own work.
        self._lock = threading.RLock()

    def __reduce__(self) -> tuple[type[BufferPool], tuple[int]]:
        return BufferPool, (self.largest_reserve,)

    def take(self, nbytes: int) -> torch.Tensor:
        """A tensor of so many bytes, with whatever values, that begins at an aligned address."""
        memory = self._reuse(nbytes)
        if memory is None:
            memory = np.empty(nbytes + ALIGNMENT, dtype=np.uint8)
        start = -memory.ctypes.data % ALIGNMENT
        # The tensor keeps this view alive, and nothing else does: when it dies, no tensor is left.
        view = memory[start : start + nbytes]
        weakref.finalize(view, _give_back, weakref.ref(self), memory)
        return torch.from_numpy(view)

    def _reuse(self, nbytes: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]] | None:
        with self._lock:
            for index, memory in enumerate(self._idle):
                if nbytes + ALIGNMENT <= memory.nbytes <= 2 * (nbytes + ALIGNMENT):
                    del self._idle[index]
                    return memory
        return None

    def give_back(self, memory: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> None:
        """Keep memory for the next one who needs it; the longest unused is dropped where it becomes too much."""
        with self._lock:
            self._idle.append(memory)
            while sum(idle.nbytes for idle in self._idle) > self.largest_reserve:
                self._idle.popleft()


def _give_back(pool: weakref.ref[BufferPool], memory: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> None:
    owner = pool()
    if owner is not None:
        owner.give_back(memory)

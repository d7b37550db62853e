"""Streams of data set indices: random access where the sampler allows it, sequential access otherwise."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import RandomSampler, SequentialSampler

from .samplers import SeedableRandomSampler

# Batches whose indices are converted to Python numbers at a time.
_BLOCK = 64


class SequentialSource:
    """Position p holds index p; needs no memory."""

    def __init__(self, length: int) -> None:
        self.length = length

    def take(self, first: int, last: int) -> list[Any]:
        """The indices at positions [first, last)."""
        return list(range(first, last))

    def batches(self, first: int, size: int, stride: int, count: int) -> Iterator[list[Any]]:
        """``count`` batches of ``size`` indices that begin at positions ``first``, ``first + stride``, ..."""
        for begin in range(first, first + count * stride, stride):
            yield list(range(begin, begin + size))

    def close(self) -> None:
        """Called once the stream was read to its end."""


class PermutationSource(SequentialSource):
    """A permutation as one int64 tensor: 8 bytes per sample, converted to Python numbers on demand.

    The generator is drawn from once more at the end of the stream, like in :class:`torch.utils.data.RandomSampler`, so
    that later epochs have the orders of plain PyTorch.
    """

    def __init__(self, permutation: torch.Tensor, generator: torch.Generator | None = None) -> None:
        super().__init__(permutation.numel())
        self.permutation = permutation
        self.generator = generator

    def take(self, first: int, last: int) -> list[Any]:
        indices: list[Any] = self.permutation[first:last].tolist()
        return indices

    def batches(self, first: int, size: int, stride: int, count: int) -> Iterator[list[Any]]:
        rows = torch.as_strided(self.permutation, (count, size), (stride, 1), first)
        # Converted in blocks: one call of torch costs as much as everything else for a batch of indices.
        for block in range(0, count, _BLOCK):
            yield from rows[block : block + _BLOCK].tolist()

    def close(self) -> None:
        if self.generator is not None:
            torch.randperm(self.length, generator=self.generator)


class StreamSource:
    """Sequential access to the indices of a sampler; keeps the first ``head_size`` for completing last batches."""

    def __init__(self, sampler: Iterable[Any], head_size: int) -> None:
        self._iterator = iter(sampler)
        self._head_size = head_size
        self.head: list[Any] = []

    def read(self, count: int) -> list[Any]:
        """The next ``count`` indices, or as many as are left."""
        items = list(islice(self._iterator, count))
        missing = self._head_size - len(self.head)
        if missing > 0:
            self.head.extend(items[:missing])
        return items

    def skip(self, count: int) -> None:
        """Draw and drop ``count`` indices; no sample is read."""
        while count > 0 and (drawn := self.read(min(count, 1 << 16))):
            count -= len(drawn)

    def chunks(self, size: int) -> Iterator[list[Any]]:
        """The rest of the stream in lists of ``size`` indices; the last one may be shorter."""
        while chunk := self.read(size):
            yield chunk


def random_access_source(sampler: Any) -> SequentialSource | None:
    """The indices of a sampler that draws a whole epoch's order at once; None for any other sampler."""
    if type(sampler) is SequentialSampler:
        return SequentialSource(len(sampler))
    if isinstance(sampler, SeedableRandomSampler):
        return PermutationSource(sampler.permutation()) if sampler.is_permutation else None
    if type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == len(sampler.data_source):
        permutation = torch.randperm(sampler.num_samples, generator=sampler.generator)
        return PermutationSource(permutation, sampler.generator)
    return None

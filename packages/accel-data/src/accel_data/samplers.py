"""Samplers that shuffle by seed and epoch or skip batches, and lookup of a loader's sampler."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler, SequentialSampler

from accel_state.arguments import check_number
from accel_state.errors import ConfigurationError


class SeedableRandomSampler(RandomSampler):
    """A random sampler whose order depends only on its seed and epoch.

    Epoch e is drawn from a generator seeded with ``data_seed + e``. Each iteration advances the epoch by one.

    Args:
        *args: those of :class:`torch.utils.data.RandomSampler`.
        data_seed: seed of epoch 0; None uses ``torch.initial_seed()``.
        **kwargs: those of :class:`torch.utils.data.RandomSampler`.

    Attributes:
        initial_seed: seed of epoch 0.
        epoch: epoch of the next iteration.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        data_seed = kwargs.pop("data_seed", None)
        super().__init__(*args, **kwargs)
        if data_seed is not None:
            data_seed = int(check_number("data_seed", data_seed, whole=True))
        self.initial_seed: int = torch.random.initial_seed() if data_seed is None else data_seed
        self.epoch: int = 0

    @property
    def is_permutation(self) -> bool:
        """True if an epoch contains each sample of the data set exactly once."""
        return not self.replacement and self.num_samples == len(self.data_source)

    def permutation(self) -> torch.Tensor:
        """Return the order of the current epoch: a tensor of shape (number of samples,); int32 if that suffices."""
        return permutation(len(self.data_source), self._seeded())

    def _seeded(self) -> torch.Generator:
        # manual_seed takes 64 bits; a seed near the limit wraps around instead of failing in a late epoch.
        return torch.Generator().manual_seed((self.initial_seed + self.epoch) % 2**64)

    def __iter__(self) -> Iterator[int]:
        self.generator: torch.Generator = self._seeded()
        self.set_epoch(self.epoch + 1)
        yield from super().__iter__()

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration."""
        self.epoch = epoch


class SkipBatchSampler(BatchSampler):
    """A batch sampler without its first batches: their indices are drawn, but no sample is read.

    Args:
        batch_sampler: any batch sampler.
        skip_batches: number of batches to skip in every iteration.
    """

    def __init__(self, batch_sampler: BatchSampler | Iterable[list[Any]], skip_batches: int = 0) -> None:
        if skip_batches < 0:
            raise ConfigurationError(f"skip_batches={skip_batches} must be at least 0")
        self.batch_sampler = batch_sampler
        self.skip_batches = skip_batches

    def __iter__(self) -> Iterator[list[Any]]:
        for index, batch in enumerate(self.batch_sampler):
            if index >= self.skip_batches:
                yield batch

    @property
    def sampler(self) -> Any:  # type: ignore[override]
        """The sampler inside the batch sampler, or None."""
        return getattr(self.batch_sampler, "sampler", None)

    @property
    def batch_size(self) -> Any:  # type: ignore[override]
        """Batch size of the batch sampler, or None."""
        return getattr(self.batch_sampler, "batch_size", None)

    @property
    def drop_last(self) -> bool:  # type: ignore[override]
        """True if the batch sampler drops an incomplete last batch."""
        return bool(getattr(self.batch_sampler, "drop_last", False))

    @property
    def total_length(self) -> int:
        """Number of batches, including skipped ones."""
        return len(self.batch_sampler)  # type: ignore[arg-type]

    def __len__(self) -> int:
        return max(0, self.total_length - self.skip_batches)


def is_plain_batch_sampler(batch_sampler: Any) -> bool:
    """Return True if batches are consecutive runs of ``batch_size`` samples; only the last one may be shorter."""
    kind = type(batch_sampler)
    return kind is BatchSampler or (
        isinstance(batch_sampler, BatchSampler) and kind.__module__.startswith("torchdata.")
    )


def inner_sampler(sampler: Any) -> Any:
    """Return the sampler directly inside a sampler or batch sampler, or None."""
    inner = getattr(sampler, "batch_sampler", None)
    return getattr(sampler, "sampler", None) if inner is None else inner


def innermost_sampler(sampler: Any) -> Any:
    """Follow ``batch_sampler`` and ``sampler`` attributes to the sampler that wraps no other."""
    while (inner := inner_sampler(sampler)) is not None:
        sampler = inner
    return sampler


def get_sampler(dataloader: DataLoader[Any]) -> Sampler[Any] | Iterable[Any] | None:
    """Return the sampler that determines the order of a loader's samples, prepared or not.

    Returns:
        The innermost sampler; the batch sampler itself if it wraps none; None for an iterable data set.
    """
    if isinstance(dataloader.dataset, torch.utils.data.IterableDataset):
        return None
    batch_sampler = dataloader.batch_sampler
    sampler: Sampler[Any] | Iterable[Any] = innermost_sampler(
        dataloader.sampler if batch_sampler is None else batch_sampler
    )
    return sampler


# Batches whose indices are converted to Python numbers at a time.
_BLOCK = 64
# Random numbers that are drawn at a time to advance a generator.
_DRAWS = 1 << 18


class SequentialSource:
    """Position p holds index p; needs no memory."""

    def __init__(self, length: int) -> None:
        self.length = length

    def take(self, first: int, last: int) -> list[Any]:
        """Return the indices at positions [first, last)."""
        return list(range(first, last))

    def batches(self, first: int, size: int, stride: int, count: int) -> Iterator[list[Any]]:
        """``count`` batches of ``size`` indices that begin at positions ``first``, ``first + stride``, ..."""
        for begin in range(first, first + count * stride, stride):
            yield list(range(begin, begin + size))

    def close(self) -> None:
        """Run once the stream was read to its end."""


def permutation(length: int, generator: torch.Generator | None) -> torch.Tensor:
    """Return what ``torch.randperm`` draws, in half of the memory up to 2**31 samples."""
    return torch.randperm(length, generator=generator, dtype=torch.int32 if length < 2**31 else torch.int64)


def skip_permutation(length: int, generator: torch.Generator) -> None:
    """Leave a generator as :func:`permutation` does, without the permutation and its memory.

    ``torch.randperm`` draws 32 bits for each element but the last one, and 64 above a limit of 2**32 / 20 elements.
    """
    if length >= (2**32 - 1) // 20 or not _draws_as_known():
        permutation(length, generator)
        return
    _draw(length, generator)


@functools.cache
def _draws_as_known() -> bool:
    """Return True if this version of torch draws a permutation as :func:`skip_permutation` assumes."""
    drawn, advanced = torch.Generator().manual_seed(1), torch.Generator().manual_seed(1)
    permutation(1000, drawn)
    _draw(1000, advanced)
    return torch.equal(drawn.get_state(), advanced.get_state())


def _draw(length: int, generator: torch.Generator) -> None:
    drawn = torch.empty(min(max(length - 1, 0), _DRAWS), dtype=torch.int32)
    for first in range(0, length - 1, _DRAWS):
        drawn[: length - 1 - first].random_(generator=generator)


class PermutationSource(SequentialSource):
    """A permutation as one tensor: 4 bytes per sample up to 2**31 samples, converted to Python numbers on demand.

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
            skip_permutation(self.length, self.generator)


class StreamSource:
    """Sequential access to the indices of a sampler.

    Args:
        sampler: the sampler.
        head_size: how many of the first indices are kept, for completing last batches.
        on_first: called with the first indices that are read.
    """

    def __init__(
        self,
        sampler: Iterable[Any],
        head_size: int,
        on_first: Callable[[list[Any]], None] | None = None,
    ) -> None:
        self._iterator = iter(sampler)
        self._head_size = head_size
        self._on_first = on_first
        self.head: list[Any] = []

    def read(self, count: int) -> list[Any]:
        """Return the next ``count`` indices, or as many as are left."""
        items = list(islice(self._iterator, count))
        if self._on_first is not None:
            on_first, self._on_first = self._on_first, None
            on_first(items)
        missing = self._head_size - len(self.head)
        if missing > 0:
            self.head.extend(items[:missing])
        return items

    def skip(self, count: int) -> None:
        """Draw and drop ``count`` indices; no sample is read."""
        while count > 0 and (drawn := self.read(min(count, 1 << 16))):
            count -= len(drawn)

    def chunks(self, size: int) -> Iterator[list[Any]]:
        """Yield the rest of the stream in lists of ``size`` indices; the last one may be shorter."""
        while chunk := self.read(size):
            yield chunk


def is_random_access(sampler: Any) -> bool:
    """Return True if a sampler draws an epoch's order at once, each index once: any position can be computed."""
    if isinstance(sampler, SeedableRandomSampler):
        return sampler.is_permutation
    if type(sampler) is RandomSampler:
        return not sampler.replacement and sampler.num_samples == len(sampler.data_source)
    return type(sampler) is SequentialSampler


def random_access_source(sampler: Any) -> SequentialSource | None:
    """Return the indices of a sampler for which :func:`is_random_access` holds; None for any other sampler."""
    if not is_random_access(sampler):
        return None
    if isinstance(sampler, SeedableRandomSampler):
        return PermutationSource(sampler.permutation())
    if isinstance(sampler, RandomSampler):
        return PermutationSource(permutation(sampler.num_samples, sampler.generator), sampler.generator)
    return SequentialSource(len(sampler))

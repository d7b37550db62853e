"""Warns if ranks among which a loader divides its samples differ in length, seed or first indices."""

from __future__ import annotations

from collections.abc import Sized
from itertools import islice
from typing import Any, Final
from zlib import crc32

import torch.distributed as dist
from torch.utils.data import IterableDataset, Subset

from accel_state import get_logger
from accel_state.state import PartialState

from ._torch_compat import default_store
from .samplers import SeedableRandomSampler

logger: Final = get_logger(__name__)

# What is compared, and how many indices of a subset.
_WHAT: Final = ("{} samples", "an order of the seed {}", "indices with the checksum {}")
_INDICES: Final = 10_000

_ADVICE: Final = (
    "If each rank reads a part of its own, as after split_dataset_by_node, set already_sharded=True (an attribute of "
    "the data set or the loader, or in DataLoaderConfiguration). Otherwise give every rank all samples, in the same "
    "order."
)


def compare_between_ranks(dataset: Any, sampler: Any, num_processes: int) -> None:
    """Warn if length, seed of the order or indices of a subset differ between the first and the last rank.

    Nothing else of a data set is compared, and nothing of an iterable one.

    Args:
        dataset: that of a loader.
        sampler: its innermost sampler, if it has one.
        num_processes: ranks among which the loader divides the samples.
    """
    if isinstance(dataset, IterableDataset) or not _is_one_of_pair(num_processes):
        return
    name = type(dataset).__name__
    own = [_length(dataset, name), "", _digest_of_subset(dataset)]
    if isinstance(sampler, SeedableRandomSampler):
        own[1] = str(sampler.initial_seed)
    found = _exchange_between_first_and_last(f"data/{type(dataset).__module__}.{name}", "\n".join(own))
    if found is None:
        return
    rank, other_rank = _pair()
    for what, mine, other in zip(_WHAT, own, found.split("\n"), strict=False):
        if mine and other and mine != other:
            logger.warning_once(
                "The data set %s has %s on rank %d and %s on rank %d, and its loader divides the samples among the "
                "ranks once more. %s",
                *(name, what.format(mine), rank, other, other_rank, _ADVICE),
                main_process_only=False,
            )
            return


def _digest_of_subset(dataset: Any) -> str:
    """Return a checksum of the first indices of a ``torch.utils.data.Subset``, as ``random_split`` makes them."""
    digest = 0
    inner = dataset
    while isinstance(inner, Subset):
        digest = crc32(repr(list(islice(inner.indices, _INDICES))).encode(), digest)
        inner = inner.dataset
    return "" if inner is dataset else str(digest)


def _length(dataset: Any, name: str) -> str:
    if not isinstance(dataset, Sized):
        return ""
    try:
        return str(len(dataset))
    except Exception as error:
        # Of an object of the user's without a length, whose class inherits __len__.
        logger.info("The length of the data set %s is not compared between ranks: %r", name, error)
        return ""


def compare_first_indices(digest: int, num_processes: int) -> None:
    """Warn if the first indices of an epoch differ between the first and the last rank, without waiting.

    Args:
        digest: of the first indices.
        num_processes: ranks among which the loader divides the samples.
    """
    if not _is_one_of_pair(num_processes):
        return
    if _exchange_between_first_and_last("first", str(digest)) not in (None, str(digest)):
        logger.warning(
            "The order of the samples in this epoch differs between ranks: some samples are read twice and others not "
            "at all. The loader's sampler draws from a generator with another seed on each rank. Copy the generator "
            'from rank 0 (rng_types=["generator"] for that of the sampler, "torch", "numpy", "python" for the global '
            "ones).",
            main_process_only=False,
        )


def _pair() -> tuple[int, int]:
    """Return this rank, and the one that it is compared with."""
    state = PartialState()
    return state.process_index, state.num_processes - 1 - state.process_index


def _is_one_of_pair(num_processes: int) -> bool:
    """Return True if this is the first or the last rank of a run that divides its samples among all ranks."""
    world = PartialState().num_processes
    if world == 1 or num_processes != world or not dist.is_initialized() or dist.get_backend() == "fake":
        return False
    return _pair()[0] in (0, world - 1)


def _exchange_between_first_and_last(kind: str, text: str) -> str | None:
    """Return what the other rank of the pair said in its call of the same number; None if it has not come there yet.

    No rank waits: each leaves a note in the store of the process group, so that the later one notices.
    """
    (rank, other), store = _pair(), default_store()
    number = store.add(f"accel/{kind}/count/{rank}", 1)
    store.set(f"accel/{kind}/{number}/{rank}", text)
    if not store.check([f"accel/{kind}/{number}/{other}"]):
        return None
    return str(store.get(f"accel/{kind}/{number}/{other}").decode())

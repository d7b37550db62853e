"""Notices what differs between ranks where a loader divides the samples among them: data sets, and late orders."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import torch.distributed as dist
from torch.utils.data import Dataset, IterableDataset

from accel_state import get_logger
from accel_state.state import PartialState

from ._torch_compat import default_store
from .contents import READERS, contents, names_in
from .other_loaders import LoaderBatches
from .samplers import SeedableRandomSampler
from .stream_order import differing_path

logger: Final = get_logger(__name__)

_ADVICE = (
    "If each rank reads a part of its own, as after split_dataset_by_node, set already_sharded=True (an attribute of "
    "the data set or the loader, or in DataLoaderConfiguration). Otherwise give every rank all samples, in the same "
    "order."
)
_INNER = 32  # data sets in a list that are looked at

# Functions, attributes and variables that tell the rank of a process.
_RANK_NAMES = {"get_rank", "get_world_size", "process_index", "num_processes", "RANK", "WORLD_SIZE"}


def compare_between_ranks(dataset: Any, sampler: Any, num_processes: int) -> None:
    """Warn if the data sets of the first and the last rank differ, or if one reads the rank itself.

    Parts that differ between ranks differ between these two in length, in the fingerprint of Hugging Face, or in what
    they hold (see :func:`contents`).

    Args:
        dataset: that of a loader.
        sampler: its innermost sampler, if it has one.
        num_processes: ranks among which the loader divides the samples.
    """
    if num_processes == 1:
        return
    name = type(dataset).__name__
    for part in _parts(dataset):
        is_map = isinstance(part, Dataset) and not isinstance(part, IterableDataset)
        for method in READERS if is_map else ("__iter__",):
            if read := names_in(type(part), method) & _RANK_NAMES:
                logger.warning_once(
                    "%s.%s reads %s, and its loader divides the samples among the ranks once more. %s",
                    *(type(part).__name__, method, min(read), _ADVICE),
                )
                return
    if _is_one_of_pair(num_processes):
        try:
            own = contents(dataset)
        except Exception as error:
            # Of an object of the user's that cannot be read yet, such as a tensor without values.
            logger.info("The data set %s is not compared between ranks: %r", name, error)
            return
        if isinstance(sampler, SeedableRandomSampler):
            own["seed of the order"] = str(sampler.initial_seed)
        kind = f"data/{type(dataset).__module__}.{type(dataset).__qualname__}"
        found = _exchange_between_first_and_last(kind, "\n".join(f"{key}={text}" for key, text in own.items()))
        _report_data(name, own, found)


def compare_later_order(checksum: int, num_processes: int, began_alike: bool = True) -> None:
    """Warn if the orders of an epoch differ between the first and the last rank, without waiting.

    Args:
        checksum: of the order of an epoch that was read to its end, or of its first samples.
        num_processes: ranks among which the loader divides the samples.
        began_alike: its first samples were the same on every rank.
    """
    if not _is_one_of_pair(num_processes):
        return
    found = _exchange_between_first_and_last("order" if began_alike else "first", str(checksum))
    if found not in (None, str(checksum)):
        logger.warning(
            "The order of the samples in this epoch %s: some samples are read twice and others not at all. The "
            "loader's sampler draws from a generator with another seed on each rank. Copy the generator from rank 0 "
            '(rng_types=["generator"] for that of the sampler, "torch", "numpy", "python" for the global ones).',
            "began with the same ones on every rank, but differed later" if began_alike else "differs between ranks",
            main_process_only=False,
        )


def compare_stream_order(name: str, num_processes: int, order: str) -> None:
    """Warn if the first and the last rank read different samples of a stream of which each rank keeps its part.

    Args:
        name: of the data set.
        num_processes: ranks among which the loader divides the samples.
        order: describes the first samples of an epoch, see :func:`stream_order.describe`.
    """
    if not _is_one_of_pair(num_processes):
        return
    found = _exchange_between_first_and_last(f"stream/{name}", order)
    path = None if found is None else differing_path(order, found)
    if path is not None:
        logger.warning_once(
            "%s yields different samples%s on ranks %d and %d, each of which reads the whole stream and keeps its "
            "part: some samples are read twice and others not at all. If the stream is shuffled, use the same seed on "
            'every rank (rng_types=["torch"] copies the generator from rank 0; "numpy" and "python" likewise), or read '
            "on one rank (dispatch_batches=True). If each rank reads a part of its own, set already_sharded=True (an "
            "attribute of the data set or the loader, or in DataLoaderConfiguration). If random augmentation alone "
            "makes them differ, nothing is lost; ranks can tell by a label or a key next to each sample.",
            *(name, f" ({path[1:]})" if path else "", *_pair()),
            main_process_only=False,
        )


def _report_data(name: str, own: dict[str, str], found: str | None) -> None:
    if found is None:
        return
    other = dict(line.partition("=")[::2] for line in found.split("\n") if line)
    differing = [key for key in {**own, **other} if own.get(key) != other.get(key)]
    if not differing:
        return
    rank, other_rank = _pair()
    key = differing[0]
    if key == "length":
        what = f"has {own[key]} samples on rank {rank} and {other[key]} on rank {other_rank}"
    elif key == "fingerprint":
        what = f"has the fingerprint {own[key]} on rank {rank} and {other[key]} on rank {other_rank}"
    else:
        what = f"differs between ranks {rank} and {other_rank} ({key})"
    logger.warning_once(
        "The data set %s %s, and its loader divides the samples among the ranks once more. %s",
        *(name, what, _ADVICE),
        main_process_only=False,
    )


def _pair() -> tuple[int, int]:
    """This rank, and the one that it is compared with."""
    state = PartialState()
    return state.process_index, state.num_processes - 1 - state.process_index


def _is_one_of_pair(num_processes: int) -> bool:
    """Whether this is the first or the last rank of a run that divides its samples among all ranks."""
    world = PartialState().num_processes
    if world == 1 or num_processes != world or not dist.is_initialized() or dist.get_backend() == "fake":
        return False
    return _pair()[0] in (0, world - 1)


def _exchange_between_first_and_last(kind: str, text: str) -> str | None:
    """What the other rank of the pair said in its call of the same number; None if it has not come there yet.

    No rank waits: each leaves a note in the store of the process group, so that the later one notices.
    """
    (rank, other), store = _pair(), default_store()
    number = store.add(f"accel/{kind}/count/{rank}", 1)
    store.set(f"accel/{kind}/{number}/{rank}", text)
    if not store.check([f"accel/{kind}/{number}/{other}"]):
        return None
    return str(store.get(f"accel/{kind}/{number}/{other}").decode())


def _parts(dataset: Any) -> Iterator[Any]:
    """A data set, and those that it reads."""
    if not isinstance(dataset, Dataset):
        return
    yield dataset
    for value in vars(dataset).values():
        for inner in value[:_INNER] if isinstance(value, list | tuple) else (value,):
            yield from _parts(inner)
    if isinstance(dataset, LoaderBatches):
        yield dataset.loader
    if isinstance(dataset, LoaderBatches):
        yield dataset.loader

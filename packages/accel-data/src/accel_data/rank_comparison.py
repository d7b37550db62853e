"""Notices data sets that differ between ranks, where a loader divides the samples among them."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any

import torch.distributed as dist

from accel_state import get_logger
from accel_state.state import PartialState

from ._torch_compat import default_store

logger = get_logger(__name__)


def compare_between_ranks(dataset: Any, num_processes: int) -> None:
    """Warn if the data sets of the first and the last rank differ in length, or in the fingerprint of Hugging Face.

    Parts of unequal sizes differ between these two. Each leaves a note in the store of the process group and reads that
    of the other if it is there already, so that no rank waits: the later one notices.

    Args:
        dataset: a map-style data set, when its loader is iterated first.
        num_processes: ranks among which the loader divides the samples.
    """
    state = PartialState()
    rank, world = state.process_index, state.num_processes
    other = world - 1 - rank
    if world == 1 or num_processes != world or other not in (0, world - 1) or not isinstance(dataset, Sized):
        return
    if not dist.is_initialized() or dist.get_backend() == "fake":
        return
    store, kind = default_store(), f"accel/data/{type(dataset).__module__}.{type(dataset).__qualname__}"
    number = store.add(f"{kind}/count/{rank}", 1)
    own = [str(len(dataset)), str(getattr(dataset, "_fingerprint", ""))]
    store.set(f"{kind}/{number}/{rank}", "\n".join(own))
    if not store.check([f"{kind}/{number}/{other}"]):
        return
    found = store.get(f"{kind}/{number}/{other}").decode().split("\n")
    if found == own:
        return
    what = f"{own[0]} samples on rank {rank} and {found[0]} on rank {other}"
    if found[0] == own[0]:
        what = f"the fingerprint {own[1]} on rank {rank} and {found[1]} on rank {other}"
    logger.warning_once(
        "The data set %s has %s, and its loader divides the samples among the ranks once more. If each rank reads a "
        "part of its own, as after split_dataset_by_node, set already_sharded=True (an attribute of the data set or "
        "the loader, or in DataLoaderConfiguration). Otherwise give every rank all samples.",
        type(dataset).__name__,
        what,
        main_process_only=False,
    )

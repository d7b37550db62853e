"""Collecting tensors of all ranks."""

from __future__ import annotations

from typing import Any

import torch

from accel_data.batch_ops import count_samples
from accel_state import GradientState, PartialState
from accel_state.collectives.single import Collectives
from accel_state.humanize import counted
from accel_state.logging import warn_once
from accel_state.operations import gather, gather_object
from accel_state.operations.nested import is_container, leaves, replace_leaves
from accel_state.operations.ragged import gather_ragged

from .open_loaders import loader_of


def gather_for_metrics(
    data: Any,
    state: PartialState,
    gradient_state: GradientState,
    use_gather_object: bool = False,
    collectives: Collectives | None = None,
    shares: Collectives | None = None,
    loader: Any = None,
) -> Any:
    """Gather from all ranks without the padding of the last batch; see the Accelerator's method.

    Args:
        data: of this rank.
        state: of the process.
        gradient_state: with the loaders that are being iterated.
        use_gather_object: as for the Accelerator's method.
        collectives: over the ranks that get different samples; None for all ranks.
        shares: given for scripts that were written for Accelerate, which divide by the sizes of a mesh's axes
            themselves: the ranks that get different samples or parts of samples, and contribute rows. All ranks
            contribute tensors without dimensions, which are sums of what a rank has.
        loader: as for the Accelerator's method.
    """
    loader = loader_of(data, loader, gradient_state)
    collectives = collectives or state.collectives
    others = leaves(data, test_type=lambda item: not isinstance(item, torch.Tensor) and not is_container(item))
    as_objects = use_gather_object or bool(others)
    if getattr(loader, "has_padding", False):
        if as_objects:
            _warn_about_objects_of_ranks(data)
        else:
            _warn_about_values_of_ranks(data)
    if shares is not None and not as_objects and collectives.world_size != state.num_processes:
        return _gather_shares(data, state, loader, collectives, shares)
    # A step of an elastic loader is divided in one process, too, with padding in several of its micro batches.
    divided = state.use_distributed or getattr(loader, "logical_shard", None) is not None
    if loader is not None and divided and getattr(loader, "ragged", False):
        return _gather_ragged(data, loader.real_samples, collectives, as_objects)
    gathered = gather_object(data, collectives=collectives) if as_objects else gather(data, collectives=collectives)
    if loader is None or not loader.end_of_dataloader or loader.remainder <= 0:
        return gathered
    ranks = collectives.world_size
    if as_objects:
        is_list = isinstance(data, (list, tuple))
        return gathered[: _real_rows(len(data), loader, ranks) if is_list else loader.remainder]
    kept = []
    for local, value in zip(leaves(data), leaves(gathered), strict=True):
        # A 0-dimensional tensor is a value of a rank, not of a sample.
        kept.append(value[: _real_rows(local.shape[0], loader, ranks)] if local.ndim else value)
    return replace_leaves(gathered, iter(kept))


def _real_rows(rows: int, loader: Any, ranks: int) -> int:
    """Return how many of the rows that a last step gathers are kept, given the rows of each rank.

    Each sample may have several rows, such as its tokens. Rows that are not of samples, such as a count for each class,
    are all kept. Scripts repeat a mean loss for each sample of a full batch, also where the last one is shorter.
    """
    size = getattr(loader, "padded_batch_size", None)
    if size is None or rows == loader.batch_size:
        return int(loader.remainder)
    rows_per_sample, rest = divmod(rows, size)
    if not rest:
        return int(loader.remainder) * rows_per_sample
    if loader.remainder < ranks * size:
        warn_once(
            __name__,
            f"gather_for_metrics got {counted(rows, 'row')} in a last step with padding, where each rank has "
            f"{counted(size, 'sample')}. The repeated samples cannot be dropped from them, and count twice. Gather one "
            "row per sample, and add up afterwards.",
        )
    return ranks * rows


def _warn_about_values_of_ranks(data: Any) -> None:
    """Warn once about tensors without dimensions, which padding is part of."""
    if any(leaf.ndim == 0 for leaf in leaves(data)):
        warn_once(
            __name__,
            "gather_for_metrics got a tensor without dimensions in a last step with padding or batches of different "
            "sizes. A mean or a sum over such a batch counts the repeated samples, and nothing can be dropped from it. "
            "Gather one value per sample, such as a loss with reduction='none', and average afterwards.",
        )


def _warn_about_objects_of_ranks(data: Any) -> None:
    """Warn once about lists and arrays within objects, whose padding cannot be dropped: only members of a list can."""
    # A tuple of one type has an object for each sample, as default_collate makes of strings.
    is_of_samples = isinstance(data, list) or (isinstance(data, tuple) and len({type(member) for member in data}) == 1)
    if not is_of_samples and count_samples(data):
        warn_once(
            __name__,
            f"gather_for_metrics got a {type(data).__name__} with lists or arrays in a last step with padding or "
            "batches of different sizes. Repeated samples within them cannot be dropped, and count twice in a metric. "
            "Gather one object per sample, such as [{'name': name, 'score': score}, ...], or each list by a call of "
            "its own.",
        )


def _gather_shares(data: Any, state: PartialState, loader: Any, samples: Collectives, shares: Collectives) -> Any:
    own = leaves(data)
    values = iter(gather([leaf for leaf in own if not leaf.ndim], collectives=state.collectives))
    rows = [leaf for leaf in own if leaf.ndim]
    if loader is not None and getattr(loader, "ragged", False):
        gathered = _gather_ragged(rows, loader.real_samples, shares, False)
    else:
        gathered = gather(rows, collectives=shares)
        if loader is not None and loader.end_of_dataloader and loader.remainder > 0:
            # The ranks that share a sample have the same place among those with different ones.
            places = shares.all_gather_object(samples.rank)
            for number, padded in enumerate(gathered):
                each = padded.shape[0] // len(places)
                real = _real_rows(each, loader, samples.world_size)
                parts = zip(padded.split(each), places, strict=True)
                kept = [part[: max(0, real - place * each)] for part, place in parts]
                gathered[number] = torch.cat(kept)
    found = iter(gathered)
    return replace_leaves(data, (next(found if leaf.ndim else values) for leaf in own))


def _gather_ragged(data: Any, real_samples: int | None, collectives: Collectives, as_objects: bool) -> Any:
    """Gather batches whose sizes differ between ranks; each rank knows how many of its samples are not padding."""
    if as_objects:
        whole = real_samples is None or not isinstance(data, (list, tuple))
        return gather_object(data if whole else list(data)[:real_samples], collectives=collectives)
    tensors = [leaf.detach() for leaf in leaves(data)]
    kept = [leaf if leaf.ndim == 0 or real_samples is None else leaf[:real_samples] for leaf in tensors]
    gathered = gather_ragged("Accelerator.gather_for_metrics", data, kept, collectives)
    return replace_leaves(data, iter(gathered))

"""Collecting tensors of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from accel_state import GradientState, PartialState
from accel_state.collectives.single import Collectives
from accel_state.operations import gather, gather_object, recursively_apply
from accel_state.operations.input_checks import exchange_lengths
from accel_state.operations.nested import is_container, leaves, replace_leaves


def gather_for_metrics(
    data: Any,
    state: PartialState,
    gradient_state: GradientState,
    use_gather_object: bool = False,
    collectives: Collectives | None = None,
) -> Any:
    """Gather from all ranks without the padding of the last batch; see the Accelerator's method."""
    collectives = collectives or state.collectives
    as_objects = use_gather_object or not _only_tensors(data)
    loader = gradient_state.active_dataloader
    # A step of an elastic loader is divided in one process, too, with padding in several of its micro batches.
    divided = state.use_distributed or getattr(loader, "logical_shard", None) is not None
    if loader is not None and divided and getattr(loader, "ragged", False):
        return _gather_ragged(data, loader.real_samples, collectives, as_objects)
    gathered = gather_object(data, collectives=collectives) if as_objects else gather(data, collectives=collectives)
    if loader is None or not loader.end_of_dataloader or loader.remainder <= 0:
        return gathered
    if as_objects:
        return gathered[: loader.remainder]
    kept = []
    for local, value in zip(leaves(data), leaves(gathered), strict=True):
        # A 0-dimensional tensor is a value of a rank, not of a sample.
        kept.append(value[: loader.remainder] if local.ndim else value)
    return replace_leaves(gathered, iter(kept))


def _only_tensors(data: Any) -> bool:
    others: list[Any] = []
    recursively_apply(
        others.append, data, test_type=lambda item: not isinstance(item, torch.Tensor) and not is_container(item)
    )
    return not others


def _gather_ragged(data: Any, real_samples: int | None, collectives: Collectives, as_objects: bool) -> Any:
    """Gather batches whose sizes differ between ranks; each rank knows how many of its samples are not padding."""
    if as_objects:
        whole = real_samples is None or not isinstance(data, (list, tuple))
        return gather_object(data if whole else list(data)[:real_samples], collectives=collectives)
    tensors = [leaf.detach() for leaf in leaves(data)]
    kept = [leaf if leaf.ndim == 0 or real_samples is None else leaf[:real_samples] for leaf in tensors]
    lengths = [leaf.shape[0] if leaf.ndim else 0 for leaf in kept]
    table = exchange_lengths("Accelerator.gather_for_metrics", data, lengths, collectives, ignored_dim=0)
    sizes = list(zip(*table, strict=True))
    gathered = collectives.all_gather_many([_padded(leaf, max(size)) for leaf, size in zip(kept, sizes, strict=True)])
    joined = (_join(rows, size, leaf.ndim) for rows, size, leaf in zip(gathered, sizes, kept, strict=True))
    return replace_leaves(data, joined)


def _padded(tensor: torch.Tensor, size: int) -> torch.Tensor:
    if tensor.ndim == 0 or tensor.shape[0] == size:
        return tensor
    padded = tensor.new_zeros((size, *tensor.shape[1:]))
    padded[: tensor.shape[0]] = tensor
    return padded


def _join(gathered: torch.Tensor, lengths: Sequence[int], ndim: int) -> torch.Tensor:
    if ndim == 0:
        return gathered
    return torch.cat([rows[:length] for rows, length in zip(gathered, lengths, strict=True)])

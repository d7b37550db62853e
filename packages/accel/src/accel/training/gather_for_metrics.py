"""Collecting tensors of all ranks."""

from __future__ import annotations

from typing import Any

import torch

from accel_state import GradientState, PartialState, operations
from accel_state.collectives.single import Collectives
from accel_state.operations import gather, gather_object, recursively_apply
from accel_state.operations.nested import is_container, leaves, replace_leaves

from ..strategies.base import Strategy


class Gathering:
    """Collecting tensors of all ranks, for an Accelerator to inherit."""

    process_state: PartialState
    gradient_state: GradientState
    strategy: Strategy

    def gather(self, tensor: Any) -> Any:
        """Concatenate nested tensors of all ranks along the first dimension; see :func:`accel.utils.gather`.

        On a mesh (ParallelismConfig) the ranks are those that get different samples.
        """
        return operations.gather(tensor, collectives=self.strategy.data_collectives)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather predictions and labels of the current batch, without the samples that only fill up the last one.

        Args:
            input_data: nested tensors whose first dimension is that of samples; or a list of objects, one a sample.
            use_gather_object: treat the data as objects even if it is made of tensors.

        Returns:
            Over the loop, exactly the samples of the data set, in its order, on every rank.
        """
        return gather_for_metrics(
            input_data, self.process_state, self.gradient_state, use_gather_object, self.strategy.data_collectives
        )

    def reduce(self, tensor: Any, reduction: Any = "sum", scale: float = 1.0) -> Any:
        """Reduce nested tensors of all ranks element by element; see :func:`accel.utils.reduce`.

        On a mesh (ParallelismConfig) the ranks are those that get different samples or different parts of them.
        """
        return operations.reduce(tensor, reduction, scale, collectives=self.strategy.averaging_collectives)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        """Pad nested tensors to the longest of all ranks; see :func:`accel.utils.pad_across_processes`."""
        return operations.pad_across_processes(tensor, dim=dim, pad_index=pad_index, pad_first=pad_first)


def gather_for_metrics(
    data: Any,
    state: PartialState,
    gradient_state: GradientState,
    use_gather_object: bool = False,
    collectives: Collectives | None = None,
) -> Any:
    """Gather from all ranks, without the samples that only filled up the last batch; see the Accelerator's method."""
    collectives = collectives or state.collectives
    as_objects = use_gather_object or not _only_tensors(data)
    loader = gradient_state.active_dataloader
    if loader is not None and state.use_distributed and getattr(loader, "ragged", False):
        return _gather_ragged(data, loader.real_samples, collectives, as_objects)
    gathered = gather_object(data, collectives=collectives) if as_objects else gather(data, collectives=collectives)
    if loader is None or not loader.end_of_dataloader or loader.remainder <= 0:
        return gathered
    if as_objects:
        return gathered[: loader.remainder]
    # A 0-dimensional tensor is a value of a rank, not of a sample.
    samples = [leaf.ndim > 0 for leaf in leaves(data)]
    cut = (
        value[: loader.remainder] if of_samples else value
        for value, of_samples in zip(leaves(gathered), samples, strict=True)
    )
    return replace_leaves(gathered, cut)


def _only_tensors(data: Any) -> bool:
    """Whether every leaf of nested data is a tensor."""
    others: list[Any] = []
    recursively_apply(
        others.append, data, test_type=lambda item: not isinstance(item, torch.Tensor) and not is_container(item)
    )
    return not others


def _gather_ragged(data: Any, real_samples: int | None, collectives: Collectives, as_objects: bool) -> Any:
    """Gather batches whose sizes differ between ranks, of which each rank knows how many samples are real."""
    if as_objects:
        whole = real_samples is None or not isinstance(data, (list, tuple))
        return gather_object(data if whole else list(data)[:real_samples], collectives=collectives)
    tensors = [leaf.detach() for leaf in leaves(data)]
    kept = [leaf if leaf.ndim == 0 or real_samples is None else leaf[:real_samples] for leaf in tensors]
    lengths = torch.tensor([leaf.shape[0] if leaf.ndim else 0 for leaf in kept], dtype=torch.int64)
    table = collectives.all_gather(lengths)
    longest = table.amax(0).tolist()
    padded = [_padded(leaf, size) for leaf, size in zip(kept, longest, strict=True)]
    gathered = collectives.all_gather_many(padded)
    return replace_leaves(data, (_join(value, table[:, i].tolist(), kept[i].ndim) for i, value in enumerate(gathered)))


def _padded(tensor: torch.Tensor, size: int) -> torch.Tensor:
    if tensor.ndim == 0 or tensor.shape[0] == size:
        return tensor
    padded = tensor.new_zeros((size, *tensor.shape[1:]))
    padded[: tensor.shape[0]] = tensor
    return padded


def _join(gathered: torch.Tensor, lengths: list[int], ndim: int) -> torch.Tensor:
    if ndim == 0:
        return gathered
    return torch.cat([rows[:length] for rows, length in zip(gathered, lengths, strict=True)])

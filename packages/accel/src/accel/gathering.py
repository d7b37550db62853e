"""Collecting tensors of all ranks."""

from __future__ import annotations

from typing import Any

from accel_state import GradientState, PartialState, operations

from . import metrics
from .strategies.base import Strategy


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
        return metrics.gather_for_metrics(
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

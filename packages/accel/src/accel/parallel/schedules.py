"""How a pipeline works. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from accel_state.errors import ConfigurationError

SCHEDULES: Mapping[str, str] = {"gpipe": "ScheduleGPipe", "1f1b": "Schedule1F1B", "interleaved1f1b": "ScheduleInterleaved1F1B"}
"""Schedules of torch.distributed.pipelining, by name. Those without bubbles are left out: with sharded parameters torch computes wrong
gradients in them, without an error."""


@dataclass
class PipelineParallelConfig:
    """How batches go through the stages of a pipeline.

    Args:
        schedule: the order of forward and backward passes: "1f1b" (as few micro batches in memory as there are stages), "gpipe" (all
            forward passes first), or "interleaved1f1b" (several stages on each rank, so that less time is spent waiting).
        num_microbatches: parts that each batch of a rank is divided into; None takes as many as there are ranks in the pipeline.
        stages_per_rank: stages on each rank; None takes 2 for "interleaved1f1b" and 1 otherwise.
        loss_fn: the loss of a micro batch, from outputs and labels, a mean; None takes that of Transformers' causal language models.
        example: a small batch, to compare the stages with the whole model: a tuple or a dict. Made up for models of Transformers.

    Raises:
        ConfigurationError: a value that is not known, or that contradicts another.
    """

    schedule: str = "1f1b"
    num_microbatches: int | None = None
    stages_per_rank: int | None = None
    loss_fn: Callable[[Any, Any], Any] | None = None
    example: Mapping[str, Any] | Sequence[Any] | None = None

    def __post_init__(self) -> None:
        if self.schedule not in SCHEDULES:
            raise ConfigurationError(
                f"schedule={self.schedule!r} is not one of {', '.join(SCHEDULES)}. Set it in PipelineParallelConfig. (In torch's schedules "
                "without bubbles, gradients of sharded parameters are wrong.)"
            )
        interleaved = self.schedule == "interleaved1f1b"
        if self.stages_per_rank is None:
            self.stages_per_rank = 2 if interleaved else 1
        for name in ("num_microbatches", "stages_per_rank"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ConfigurationError(f"{name}={value!r} is no whole number from 1. Set it in PipelineParallelConfig.")
        if (self.stages_per_rank > 1) != interleaved:
            raise ConfigurationError(
                f"stages_per_rank={self.stages_per_rank} does not go with schedule={self.schedule!r}: several stages on a rank are "
                "interleaved. Use schedule='interleaved1f1b' with 2 or more, or another schedule with 1."
            )

    def check_batch(self, samples: int, ranks: int) -> int:
        """The number of micro batches of a batch.

        Raises:
            ConfigurationError: the batch cannot be divided so.
        """
        parts = self.num_microbatches or ranks
        if self.schedule == "1f1b" and parts < ranks:
            reason = f"1f1b needs at least as many as there are ranks in the pipeline ({ranks})"
        elif self.schedule == "interleaved1f1b" and parts % ranks:
            reason = f"interleaved1f1b needs a multiple of the {ranks} ranks of the pipeline"
        elif samples % parts:
            reason = f"a batch of {samples} samples on a rank cannot be divided so (drop_last=True leaves a short last batch out)"
        else:
            return parts
        raise ConfigurationError(f"num_microbatches={parts}: {reason}. Set it in PipelineParallelConfig, or change the batch size.")

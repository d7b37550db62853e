"""What prepare() knows of a model when its DeepSpeed configuration is completed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class PreparedFacts:
    """What ``DeepSpeedPlugin.resolve`` fills "auto" in from.

    Attributes:
        world_size: processes that the model is trained on.
        mixed_precision: "no", "fp16", "bf16" or "fp8".
        micro_batch_sizes: samples a process and batch of each loader that is prepared together with the model, None for a loader that
            does not know; empty without loaders.
        known_micro_batch_size: samples a process and batch of what was prepared earlier, for a model that comes without a loader.
        gradient_accumulation_steps: those of the Accelerator.
        model: the model; only its ``config`` is read, for the hidden size.
        optimizer: what was passed to ``prepare``: a torch optimizer, a DummyOptim, or None for a model that is not trained.
        scheduler: the same: a scheduler, a DummyScheduler or None.
        scheduler_steps_per_step: how often a scheduler of the script is stepped for each optimizer step; schedules of a dummy, which
            are written in the same steps, are divided by it.
        more: other values, by dotted path in the DeepSpeed configuration, for whatever else is "auto" there.
    """

    world_size: int
    mixed_precision: str = "no"
    micro_batch_sizes: tuple[int | None, ...] = ()
    known_micro_batch_size: int | None = None
    gradient_accumulation_steps: int = 1
    model: Any = None
    optimizer: Any = None
    scheduler: Any = None
    scheduler_steps_per_step: int = 1
    more: Mapping[str, Any] = field(default_factory=dict)

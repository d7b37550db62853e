"""Stand-ins for an optimizer and a scheduler that a DeepSpeed configuration describes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class DummyOptim:
    """Takes the place of an optimizer in a script whose DeepSpeed configuration has an "optimizer".

    Args:
        params: parameters or groups of them, as for any torch optimizer.
        lr: what "auto" stands for in ``optimizer.params.lr``.
        weight_decay: what "auto" stands for in ``optimizer.params.weight_decay``.
        **kwargs: what "auto" stands for in further ``optimizer.params``, such as ``betas`` and ``eps``.
    """

    def __init__(self, params: Any, lr: float = 0.001, weight_decay: float = 0, **kwargs: Any) -> None:
        self.params = params
        self.lr = lr
        self.weight_decay = weight_decay
        self.kwargs = kwargs


class DummyScheduler:
    """Takes the place of a scheduler in a script whose DeepSpeed configuration has a "scheduler".

    Args:
        optimizer: the optimizer or DummyOptim that it schedules.
        total_num_steps: steps of the schedule, in the same steps as those of a torch scheduler in this script; what "auto" stands for in
            ``scheduler.params.total_num_steps``.
        warmup_num_steps: the same for ``scheduler.params.warmup_num_steps``.
        lr_scheduler_callable: makes a scheduler of the optimizer that DeepSpeed made, for a configuration without a "scheduler".
        **kwargs: what "auto" stands for in further ``scheduler.params``.
    """

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int | None = None,
        warmup_num_steps: int = 0,
        lr_scheduler_callable: Callable[[Any], Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.optimizer = optimizer
        self.total_num_steps = total_num_steps
        self.warmup_num_steps = warmup_num_steps
        self.lr_scheduler_callable = lr_scheduler_callable
        self.kwargs = kwargs

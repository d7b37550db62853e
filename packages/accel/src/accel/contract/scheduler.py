"""Prepared learning rate schedulers, which step when the optimizer does."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from accel_state import GradientState, PartialState
from accel_state.logging import warn_once

from .optimizer import AcceleratedOptimizer, average_over_ranks


class AcceleratedScheduler:
    """A prepared scheduler.

    With ``step_with_optimizer`` (the Accelerator's ``step_scheduler_with_optimizer``) the loop may call ``step`` for
    every micro batch; the schedule advances only when the optimizers stepped. Schedules are usually defined in batches
    of one process, and n processes consume n of them at a time, so it advances n steps at once, unless with
    ``split_batches`` the loader's batch size is that of all processes. A scheduler that takes a metric
    (ReduceLROnPlateau) counts evaluations, so it advances once per call, also by a call in the middle of a window or
    after a skipped step; only calls since which no optimizer stepped are ignored there. Its metric is averaged over the
    ranks, which would otherwise train with learning rates of their own, so every rank must call it.

    Args:
        scheduler: the scheduler to wrap; it is at ``.scheduler``.
        optimizers: the prepared optimizer, or several of them.
        step_with_optimizer: advance together with the optimizer; otherwise every call advances by one.
        split_batches: whether the loader's batch size is that of all processes together.
        num_processes: how many processes consume different batches; all by default.
    """

    def __init__(
        self,
        scheduler: Any,
        optimizers: AcceleratedOptimizer | Sequence[AcceleratedOptimizer],
        step_with_optimizer: bool = True,
        split_batches: bool = False,
        num_processes: int | None = None,
    ) -> None:
        self.scheduler = scheduler
        several = [optimizers] if isinstance(optimizers, AcceleratedOptimizer) else list(optimizers)
        self.optimizers: list[AcceleratedOptimizer] = several
        self.step_with_optimizer = step_with_optimizer
        self.split_batches = split_batches
        self.gradient_state: GradientState = GradientState()
        # The first argument of `step` is a metric if it is required, or named so.
        first = next(iter(inspect.signature(scheduler.step).parameters.values()), None)
        self._takes_metrics = first is not None and first.name == "metrics"
        self._counts_evaluations = self._takes_metrics or (
            first is not None and first.default is first.empty and first.kind is not first.VAR_POSITIONAL
        )
        advances_once = split_batches or not step_with_optimizer or self._counts_evaluations
        self.noted_steps: int = 0
        """Steps of the optimizers at the last look; those since then are new."""
        self._steps_per_call = 1 if advances_once else num_processes or PartialState().num_processes

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Advance the schedule, if the optimizers stepped.

        Args:
            *args: for the wrapped scheduler, such as the metric of ReduceLROnPlateau.
            **kwargs: likewise.
        """
        if not self.step_with_optimizer:
            if self._takes_metrics:
                args, kwargs = self._averaged(args, kwargs)
            self.scheduler.step(*args, **kwargs)
            return
        # An evaluation may come in the middle of a window, and what counts are the steps before it.
        if not (self._counts_evaluations and self.note_steps()):
            if not self.gradient_state.sync_gradients:
                if self.gradient_state.adjust_scheduler and hasattr(self.scheduler, "_step_count"):
                    self.scheduler._step_count += 1
                return
            for optimizer in self.optimizers:
                if optimizer.step_was_skipped:
                    return
        if self._steps_per_call > 1:
            self._warn_of_epochs()
        elif self._takes_metrics:
            args, kwargs = self._averaged(args, kwargs)
        for _ in range(self._steps_per_call):
            # The last call of n processes may cross the end of a schedule of fixed length. In one process a call too
            # many raises torch's error.
            if self._steps_per_call > 1 and self._has_ended():
                return
            self.scheduler.step(*args, **kwargs)

    def note_steps(self) -> int:
        """Note which steps the optimizers have taken, and return how many they took since the last note."""
        before, self.noted_steps = self.noted_steps, sum(optimizer.steps_taken for optimizer in self.optimizers)
        return self.noted_steps - before

    def _averaged(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of ``step`` with the mean of the ranks' metrics."""
        metric: Any = kwargs["metrics"] if "metrics" in kwargs else next(iter(args), None)
        strategies = (optimizer.strategy for optimizer in self.optimizers if optimizer.strategy is not None)
        ranks = getattr(next(strategies, None), "averaging_collectives", None)
        if ranks is None or ranks.world_size == 1 or not hasattr(metric, "__float__"):
            return args, kwargs
        mean = float(average_over_ranks(float(metric), ranks))
        return (args, {**kwargs, "metrics": mean}) if "metrics" in kwargs else ((mean, *args[1:]), kwargs)

    def _warn_of_epochs(self) -> None:
        """Warn of a call after several steps and outside of a loader's loop: its schedule is one in epochs."""
        if self.note_steps() > len(self.optimizers) and not self.gradient_state.in_dataloader:
            warn_once(
                __name__,
                f"scheduler.step() was called once for several optimizer steps, and {type(self.scheduler).__name__} "
                f"advances by {self._steps_per_call} at each call, because that many processes train. If it counts "
                "epochs, do not pass it to prepare().",
            )

    def _has_ended(self) -> bool:
        """Return whether a schedule of fixed length (OneCycleLR) has taken all its steps."""
        total = getattr(self.scheduler, "total_steps", None)
        return total is not None and getattr(self.scheduler, "last_epoch", -1) >= total

    def get_last_lr(self) -> list[float]:
        """Return the learning rates of the last step."""
        rates: list[float] = self.scheduler.get_last_lr()
        return rates

    def get_lr(self) -> list[float]:
        """Return the learning rates as the wrapped scheduler computes them."""
        rates: list[float] = self.scheduler.get_lr()
        return rates

    def print_lr(self, *args: Any, **kwargs: Any) -> None:
        """Print the learning rates on the main process."""
        if hasattr(self.scheduler, "print_lr"):
            self.scheduler.print_lr(*args, **kwargs)
        else:  # torch dropped it in 2.7
            PartialState().print(f"Adjusting learning rates to {self.get_last_lr()}.")

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped scheduler's state."""
        state: dict[str, Any] = self.scheduler.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of :meth:`state_dict`."""
        self.scheduler.load_state_dict(state_dict)

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":
            raise AttributeError(name)
        return getattr(self.scheduler, name)

"""Training on XLA devices, whose operations are recorded, and compiled and run where a step ends.

A process trains on one device here. Several processes, one for each chip, have a full model each and average their
gradients; :mod:`accel.strategies.xla_spmd` trains on all devices of one process.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, cast

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from accel_state import DistributedType, GradientState, PartialState, get_logger
from accel_state.errors import ConfigurationError

from ..contract.strategy import Strategy
from ..core.max_norm import refuse_max_norm
from ..core.placing import move_in_place

if TYPE_CHECKING:
    from ..kwargs.base import Handlers

logger: Final = get_logger(__name__)

# The first step compiles, and the second one too: the optimizer has its state then. Others compile for new shapes.
_FIRST_STEPS = 3
_MANY = 5


@dataclass
class Steps:
    """How many steps an optimizer has made, and how many of the later ones were compiled."""

    count: int = 0
    compiled_late: int = 0


class XlaStrategy(Strategy):
    """A full model on the XLA device of each process.

    Attributes:
        averages: whether gradients are averaged over the processes.

    Each step of an optimizer ends a graph. The loaders end one for a batch without such a step.
    """

    distributed_type: DistributedType | None = DistributedType.XLA
    skips_gradient_sync = True
    averages_weights = True

    def attach(self, state: PartialState, handlers: Handlers) -> None:
        super().attach(state, handlers)
        self._device = cast("Any", state.device_backend)
        self._count = self._use_devices()
        self._device.start()
        self.averages: bool = state.use_distributed
        self._unsynchronised: set[int] = set()  # models under no_sync, by id
        self._handles: list[Any] = []
        self._averaged: Any = WeakIdKeyDictionary()
        self._watched: Any = WeakIdKeyDictionary()

    def _use_devices(self) -> int:
        """Decide how the devices of this process are used, before any of them is; returns how many are."""
        return 1

    def axis_rank(self, axis: str) -> int:
        return self.state.process_index if axis == "dp_replicate" else 0

    def place(self, model: nn.Module) -> nn.Module:
        """Move a model in place: its parameters stay the objects that optimizers and tied layers hold."""
        return move_in_place(model, self.state.device)

    def check_model(self, model: nn.Module) -> None:
        if self.averages:
            refuse_max_norm(model)

    def wrap(self, model: nn.Module) -> nn.Module:
        if self.averages and model not in self._averaged:
            self._averaged[model] = True
            self.state.collectives.broadcast_many([*model.parameters(), *model.buffers()])
            for parameter in model.parameters():
                if parameter.requires_grad:
                    self._handles.append(parameter.register_post_accumulate_grad_hook(self._averager(id(model))))
        return model

    def _averager(self, model: int) -> Any:
        """Return a hook that averages a complete gradient over the processes, unless gradients accumulate."""
        count, gradient_state, unsynchronised = self.state.num_processes, GradientState(), self._unsynchronised
        all_reduce = self._device.module.all_reduce

        def average(parameter: torch.Tensor) -> None:
            if gradient_state.sync_gradients and model not in unsynchronised:
                all_reduce("sum", [parameter.grad], scale=1 / count)

        return average

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        entered = id(model) not in self._unsynchronised
        self._unsynchronised.add(id(model))
        try:
            yield
        finally:
            if entered:
                self._unsynchronised.discard(id(model))

    @contextmanager
    def sync_in_backward(self, model: nn.Module) -> Iterator[None]:
        held = id(model) in self._unsynchronised
        self._unsynchronised.discard(id(model))
        try:
            yield
        finally:
            if held:
                self._unsynchronised.add(id(model))

    def remap_optimizer(self, optimizer: Optimizer) -> None:
        """End a graph after each step of an optimizer."""
        if optimizer not in self._watched and hasattr(optimizer, "register_step_post_hook"):
            self._watched[optimizer] = Steps()
            self._handles.append(optimizer.register_step_pre_hook(self._check_placement))
            self._handles.append(optimizer.register_step_post_hook(self._end_step))

    def _check_placement(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._watched[optimizer].count:
            return
        for parameter in chain.from_iterable(group["params"] for group in optimizer.param_groups):
            if parameter.device.type != self.state.device.type:
                raise ConfigurationError(
                    f"{type(optimizer).__name__} holds a parameter of shape {tuple(parameter.shape)} on "
                    f"{parameter.device}, which no prepared model has: training would not change the model. Leave "
                    "moving the model to prepare(), or create the optimizer after model.to(accelerator.device)."
                )

    def _end_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        before = self._device.compilations()
        self._device.run()
        steps = self._watched[optimizer]
        steps.count += 1
        if steps.count > _FIRST_STEPS and self._device.compilations() > before:
            steps.compiled_late += 1
            if steps.compiled_late == _MANY:
                logger.warning(
                    "%d of %d training steps were recompiled, which takes many times longer than running one: "
                    "batches have different shapes, or the code of the step changes. Pad all batches to one length.",
                    steps.compiled_late,
                    steps.count,
                )

    def forget(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._watched, self._averaged = WeakIdKeyDictionary(), WeakIdKeyDictionary()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_handles": [], "_watched": WeakIdKeyDictionary(), "_averaged": WeakIdKeyDictionary()}

"""Checks of objects that were not prepared, or not used, where training goes wrong.

They are looked for when objects are prepared and in the first steps, so later steps cost nothing.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from accel_state import GradientState
from accel_state.errors import ConfigurationError
from accel_state.logging import warn_once

from ..core.local_part import local
from ..core.unwrap import extract_model_from_parallel
from ..precision.scaler import SharedGradScaler
from ..training.gradient_accumulation import Accumulation
from .prepare import Preparation

_WATCHED_PASSES = 2  # backward passes whose steps are checked: SAM steps after two


@dataclass(eq=False)
class StartupChecks:
    """What the first backward passes show about the prepared objects."""

    prepared: Preparation
    _hook: RemovableHandle | None = None
    _passes: int = 0
    _steps: int = 0  # of the prepared optimizers before the first pass

    def next(self, loss: Any, accumulation: Accumulation) -> bool:
        """Check before a backward pass; False when there is nothing left to do."""
        self._passes += 1
        if self._passes > _WATCHED_PASSES:
            self.stop()
            return False
        if self._hook is not None:
            return True
        prepared, window_steps = self.prepared, accumulation.num_steps
        _check_schedulers(prepared)
        ranks = prepared.strategy.data_collectives.world_size
        # Libraries that accumulate themselves, such as Transformers, turn sync_gradients off before the backward pass.
        never_entered = not accumulation.has_accumulated and accumulation.elastic is None
        if window_steps > 1 and never_entered and accumulation.gradient_state.sync_gradients:
            warn_once(
                __name__,
                f"gradient_accumulation_steps={window_steps}, but accumulate() was not entered: losses are divided by "
                f"{window_steps}, and each optimizer.step() updates the weights. Put each micro batch into "
                "`with accelerator.accumulate(model):`.",
            )
        if ranks > 1 or window_steps > 1 or prepared.precision.scaler is not None or prepared.averages:
            # No optimizer other than the prepared ones should step.
            self._steps = self._count_steps()
            this = weakref.ref(self)
            self._hook = register_optimizer_step_pre_hook(lambda optimizer, *_: _before_step(this(), optimizer))
            weakref.finalize(self, self._hook.remove)
        if ranks > 1 and not prepared.strategy.shards_parameters and isinstance(loss, torch.Tensor):
            _check_parts(prepared, loss, ranks)
        return self._hook is not None

    def stop(self) -> None:
        """Remove the hook of optimizers."""
        if self._hook is not None:
            self._hook.remove()

    def _count_steps(self) -> int:
        return sum(getattr(optimizer, "steps_taken", 0) for optimizer in self.prepared.optimizers)

    def has_stepped(self) -> bool:
        """Return True if a prepared optimizer has stepped since the first backward pass, or is doing so."""
        scaler = self.prepared.precision.scaler
        return self._count_steps() != self._steps or (isinstance(scaler, SharedGradScaler) and scaler.is_stepping)


def _before_step(checks: StartupChecks | None, optimizer: Optimizer) -> None:
    if checks is None or not checks.prepared.models:
        return
    prepared = checks.prepared
    own = {id(parameter) for item in prepared.optimizers for parameter in _parameters_of(item)}
    if own.issuperset(map(id, _parameters_of(optimizer))):
        if not checks.has_stepped():
            _refuse_bypass(prepared, optimizer)
    elif _trains_prepared(prepared, optimizer):
        warn_once(
            __name__,
            f"{type(optimizer).__name__}.step was called on an optimizer that was not prepared: it does not wait for "
            "gradients to accumulate, does not undo their scaling, and does not follow parameters that prepare() "
            "replaces. Pass it to prepare(), and use what it returns.",
        )


def _refuse_bypass(prepared: Preparation, optimizer: Optimizer) -> None:
    """Refuse a step past the prepared optimizer: its gradients are incomplete or scaled, or averages miss it."""
    scaler = prepared.precision.scaler
    if scaler is not None and scaler.is_enabled():
        state = "while the loss scale of mixed_precision='fp16' multiplies its gradients"
    elif not GradientState().sync_gradients:
        state = "in the middle of an accumulation window"
    elif any(prepared.strategy.updates(optimizer, average.model) for average in prepared.averages):
        state = "while a moving average counts the steps of that one"
    else:
        return
    gradients = (local(item.grad) for item in _parameters_of(optimizer) if item.grad is not None)
    # torch's functions for state dicts step with gradients of zero, to have a state.
    if any(gradient.any() for gradient in gradients):
        raise ConfigurationError(
            f"{type(optimizer).__name__}.step() was not called by the optimizer that prepare() returned, but {state}. "
            "Call step() of the prepared optimizer instead. An optimizer that holds another one may step it in its own "
            "step() only."
        )


def _trains_prepared(prepared: Preparation, optimizer: Optimizer) -> bool:
    """Return True if an optimizer has parameters of a prepared model, or those that its preparation replaced."""
    of_models = {id(parameter) for model in prepared.models for parameter in model.parameters()}
    replaced = prepared.strategy.has_replaced
    return any(id(parameter) in of_models or replaced(parameter) for parameter in _parameters_of(optimizer))


def _check_parts(prepared: Preparation, loss: torch.Tensor, ranks: int) -> None:
    """Check the loader that is iterated and the models that the loss depends on."""
    if prepared.dataloaders and GradientState().active_dataloader is None:
        warn_once(
            __name__,
            "the first backward pass was outside of a loop over a prepared DataLoader: each process reads all samples "
            "of a loader that was not prepared. Pass the training loader to prepare(), and loop over what it returns.",
        )
    used = {id(parameter): parameter for parameter in _leaf_parameters(loss)}
    foreign = dict(used)
    for model in prepared.models:
        own = [parameter for parameter in model.parameters() if foreign.pop(id(parameter), None) is not None]
        calls = getattr(model, "first_calls", None)
        if own and calls is not None and calls.count == 0:
            name = type(extract_model_from_parallel(model)).__name__
            warn_once(
                __name__,
                f"the loss was computed with the {name} passed to prepare(), not with what prepare() returned: "
                f"gradients are averaged over the {ranks} processes after the backward pass instead of during it, and "
                "buffers differ between ranks. Write model = accelerator.prepare(model).",
            )
    if foreign:
        shapes = ", ".join(str(tuple(parameter.shape)) for parameter in list(foreign.values())[:3])
        warn_once(
            __name__,
            f"the loss depends on {len(foreign)} parameters of models that were not prepared (shapes {shapes}): their "
            f"gradients are not averaged over the {ranks} processes. Pass every model to prepare().",
        )


def _leaf_parameters(loss: torch.Tensor) -> list[nn.Parameter]:
    """Return the parameters that a loss was computed from."""
    pending, seen, found = [loss.grad_fn], set(), []
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if isinstance(variable, nn.Parameter):
            found.append(variable)
        pending.extend(function for function, _ in node.next_functions)
    return found


def _check_schedulers(prepared: Preparation) -> None:
    for scheduler in prepared.schedulers:
        optimizer = getattr(scheduler, "optimizer", None)
        if isinstance(optimizer, Optimizer) and not any(own.wraps(optimizer) for own in prepared.optimizers):
            warn_once(
                __name__,
                f"the prepared {type(scheduler.scheduler).__name__} changes the learning rate of an optimizer that was "
                "not prepared. Create it for the optimizer that is passed to prepare().",
            )


def _parameters_of(optimizer: Any) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]

"""The optimizer in a prepared loop: it steps when gradients are synchronised, and knows when a step was skipped."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from accel_state import AcceleratorState, ConfigurationError, GradientState, PartialState
from accel_state.collectives.single import Collectives
from accel_state.logging import warn_once
from accel_state.operations import send_to_device
from accel_state.state.gradient import MicroBatch

from .._torch_compat import has_overflow, tensor_version
from ..core.torch_clipping import refuse_torchs_clipping_while
from ..precision.scaler import SharedGradScaler


class AcceleratedOptimizer(Optimizer):
    """A prepared optimizer.

    The loop calls ``step`` and ``zero_grad`` for every micro batch, in either order: ``step`` does nothing before the
    window ends, and ``zero_grad`` keeps gradients that no step has used.

    Args:
        optimizer: the optimizer to wrap; it is at ``.optimizer``.
        device_placement: move the optimizer's state to this process's device.
        scaler: the loss scaler of fp16, or None.
    """

    _cleared_in: MicroBatch | None = None  # the last in which zero_grad was called
    _stepped_in: MicroBatch | None = None  # the last in which step was called
    _clears_first: bool = False  # whether the loop calls zero_grad before step
    _has_used: bool = False  # whether a step has used gradients that were not cleared since
    _before: Any = None  # its gradients before the closing micro batch's backward passes; None if no one else has any
    averages: Sequence[Any] = ()  # the moving averages of the prepared models
    strategy: Any = None  # the Accelerator's strategy
    accumulation: Any = None  # the Accelerator's accumulation windows
    steps_apart: bool = False  # whether each rank steps by its own gradients, as in LocalSGD

    def __init__(
        self, optimizer: Optimizer, device_placement: bool = True, scaler: torch.amp.GradScaler | None = None
    ) -> None:
        # Optimizer.__init__ is not called: this is an Optimizer to isinstance, and all state is the wrapped one's.
        self.optimizer = optimizer
        # A disabled scaler skips no step and divides no gradients, and the script may have its own.
        self.scaler: torch.amp.GradScaler | None = scaler if scaler is not None and scaler.is_enabled() else None
        self.gradient_state: GradientState = GradientState()
        self.device_placement = device_placement
        self._is_overflow = False
        self._step_called = False
        self.step_gate: Callable[[], bool] | None = None
        """Asked before each step, which is skipped if the answer is False; see the strategies."""
        self.steps_taken: int = 0
        """Steps of the wrapped optimizer, including those of earlier runs whose state was loaded."""
        self._treat: weakref.WeakMethod[Callable[[Optimizer], None]] | None = None
        self._treated_groups = 0
        if device_placement and optimizer.state:
            optimizer.load_state_dict(move_to_device(optimizer.state_dict(), PartialState().device))
        if isinstance(self.scaler, SharedGradScaler):
            self.scaler.expect(optimizer)
            self._refuse_clipping_of_scaled_gradients()

    @property
    def accelerator_state(self) -> AcceleratorState:
        """The state of the Accelerator of this process."""
        return AcceleratorState()

    @property
    def state(self) -> Any:
        """The wrapped optimizer's state, by parameter."""
        return self.optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optimizer.state = state

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The wrapped optimizer's parameter groups."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, param_groups: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = param_groups

    @property
    def defaults(self) -> dict[str, Any]:
        """The wrapped optimizer's default settings."""
        return self.optimizer.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self.optimizer.defaults = defaults

    def _refuse_clipping_of_scaled_gradients(self) -> None:
        parameters = (parameter for group in self.param_groups for parameter in group["params"])
        refuse_torchs_clipping_while(self._has_scaled_gradients, parameters)

    def _has_scaled_gradients(self) -> bool:
        return isinstance(self.scaler, SharedGradScaler) and not self.scaler.is_unscaled(self.optimizer)

    def wraps(self, optimizer: Any) -> bool:
        """Return True if this is the prepared form of an optimizer."""
        return optimizer is self or optimizer is self.optimizer

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters to the wrapped optimizer. Every rank must call it.

        Raises:
            ConfigurationError: the optimizer could not have been prepared with them. The group is not added.
        """
        self.optimizer.add_param_group(param_group)
        try:
            self._treat_new_groups()
        except Exception:
            del self.optimizer.param_groups[-1]
            raise

    def treat_groups(self, treat: Callable[[Optimizer], None]) -> None:
        """Call a method (with the wrapped optimizer) once groups were added, also to the wrapped optimizer itself."""
        self._treat = weakref.WeakMethod(treat)
        self._treated_groups = len(self.optimizer.param_groups)

    def _treat_new_groups(self) -> None:
        treat = None if self._treat is None else self._treat()
        if treat is not None and len(self.optimizer.param_groups) != self._treated_groups:
            treat(self.optimizer)
            if isinstance(self.scaler, SharedGradScaler):
                self._refuse_clipping_of_scaled_gradients()
            self._treated_groups = len(self.optimizer.param_groups)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of :meth:`state_dict`; its tensors may be on any device."""
        self.optimizer.load_state_dict(state_dict)

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state."""
        return self.optimizer.state_dict()

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear the gradients, unless they are still being accumulated: they are cleared once each window.

        The call may stand before the backward pass or after the step. Between loops over prepared loaders it discards a
        window that a loop has left open, and the next micro batch begins a new one.

        Args:
            set_to_none: as in torch; None takes the wrapped optimizer's default.
        """
        if self.must_keep_gradients():
            return
        if set_to_none is None:
            self.optimizer.zero_grad()
        else:
            self.optimizer.zero_grad(set_to_none=set_to_none)

    def must_keep_gradients(self) -> bool:
        """Return whether ``zero_grad`` must keep the gradients: a step will still use them."""
        state = self.gradient_state
        if state.keeps_gradients is not None:
            return state.keeps_gradients
        if state.micro_batch is not None:
            keeps = self._keeps_in(state.micro_batch)
        else:
            keeps = not (state.sync_gradients or (self.accumulation is not None and self.accumulation.discard(self)))
        self._has_used &= keeps
        return keeps

    def _keeps_in(self, batch: MicroBatch) -> bool:
        is_repeated = batch is self._cleared_in
        self._cleared_in = batch
        if batch is self._stepped_in:
            self._clears_first = False
            return not batch.closes
        if batch.position == 1:
            # There may be gradients of the last window, and of this one unless the loop clears before it steps.
            return not (batch.closes or self._has_used or (self._clears_first and not is_repeated))
        # A loop that clears last drops gradients without a step on purpose, if they are not finite for example. The
        # backward passes may be those of another optimizer's model.
        return not batch.closes or batch.backwards == 0 or self._clears_first or self._before == self.gradients_seen()

    def note_gradients(self) -> None:
        """Remember the gradients before a micro batch changes them, where several optimizers share its block."""
        self._before = self.gradients_seen()

    def gradients_seen(self) -> tuple[Any, ...]:
        """Return something that is another after each backward pass that adds to this optimizer's gradients."""
        gradients = (item.grad for group in self.param_groups for item in group["params"] if item.grad is not None)
        return tuple([(id(gradient), tensor_version(gradient)) for gradient in gradients])

    def note_step(self) -> None:
        """Remember a call of ``step``, whether it does something or not."""
        batch = self.gradient_state.micro_batch
        if batch is not None and batch is self._cleared_in and batch is not self._stepped_in:
            self._clears_first = True
        self._stepped_in = batch
        self._has_used |= self.gradient_state.sync_gradients

    def train(self) -> None:
        """Switch an optimizer that distinguishes training from evaluation (schedule-free ones) to training."""
        self._switch_mode("train")

    def eval(self) -> None:
        """Switch an optimizer that distinguishes training from evaluation (schedule-free ones) to evaluation."""
        self._switch_mode("eval")

    def _switch_mode(self, mode: str) -> None:
        switch = getattr(self.optimizer, mode, None)
        if callable(switch):
            switch()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters, unless gradients are still being accumulated.

        Args:
            closure: as in torch. Its loss is averaged over the ranks, so that all of them take the same decisions.

        Returns:
            The result of the wrapped optimizer's step; None if it was not called.

        Raises:
            ConfigurationError: the closure was to compute the gradients of a micro batch that does not end its window;
                or a closure in fp16, whose gradients would not be divided by the loss scale.
        """
        batch = self.gradient_state.micro_batch
        if batch is not None:
            self.note_step()
            if closure is not None and not batch.closes and batch.backwards == 0:
                # The closure would not be called, and the gradients of this micro batch would be missing.
                raise ConfigurationError(
                    f"{type(self.optimizer).__name__}.step(closure) in accumulate() with gradient_accumulation_steps="
                    f"{self.gradient_state.num_steps}: only the last micro batch of a window steps, and a closure may "
                    "be called several times there, so that it cannot accumulate. Use "
                    "gradient_accumulation_steps=1 and add up the losses of several batches in the closure, or call "
                    "accelerator.backward(loss) and then step() without a closure."
                )
        if not self.gradient_state.sync_gradients:
            return None
        self._has_used = True
        self._treat_new_groups()
        if self.strategy is not None and self.strategy.before_step is not None:
            self.strategy.before_step(self.optimizer)
        for average in self.averages:
            average.before_step(self)
        if self.steps_taken == 0 and closure is None:
            warn_about_gradients(self.optimizer, self.gradient_state)
        if self.step_gate is not None:
            self._is_overflow = not self.step_gate()
            if self._is_overflow:
                return None
        if closure is not None and self.strategy is not None and not self.steps_apart:
            closure = _with_average_loss(closure, self.strategy.averaging_collectives)
        if self.scaler is None:
            self.steps_taken += 1
            return self.optimizer.step() if closure is None else self.optimizer.step(closure)
        return self._scaled_step(closure)

    def _scaled_step(self, closure: Callable[[], Any] | None) -> Any:
        scaler = self.scaler
        assert scaler is not None
        if closure is not None and scaler.is_enabled():
            # torch refuses it only as a keyword, and does nothing if there are no gradients before the closure.
            raise ConfigurationError(
                f"{type(self.optimizer).__name__}.step(closure) with mixed_precision='fp16': the optimizer would use "
                "the closure's gradients multiplied by the loss scale. Use mixed_precision='bf16', or call "
                "accelerator.backward(loss) and then step() without a closure."
            )
        self._step_called = False
        # The scaler calls optimizer.step only if no gradient overflowed. Detecting the call needs no synchronisation
        # with the device.
        former = vars(self.optimizer).get("step")
        self.optimizer.step = patch_optimizer_step(self, self.optimizer.step)  # type: ignore[method-assign]
        try:
            result = scaler.step(self.optimizer) if closure is None else scaler.step(self.optimizer, closure)
        except AssertionError as error:
            if "_scale is None" not in str(error):
                raise
            raise ConfigurationError(
                "the loss of mixed_precision='fp16' was not scaled: call accelerator.backward(loss) in place of "
                "loss.backward()."
            ) from error
        finally:
            if former is None:
                del self.optimizer.step
            else:  # schedulers put a counting method there
                self.optimizer.step = former  # type: ignore[method-assign]
        if self._step_called and getattr(self.optimizer, "_step_supports_amp_scaling", False):
            # A fused step is called in any case, and leaves the parameters alone if gradients overflowed.
            self._step_called = not has_overflow(scaler, self.optimizer)
        scaler.update()
        self._is_overflow = not self._step_called
        self.steps_taken += self._step_called
        return result

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """False: a ``torch.amp.GradScaler`` of the script, which asks before it steps, divides the gradients itself.

        Raises:
            ConfigurationError: the gradients would be divided twice.
        """
        if self.scaler is not None:
            raise ConfigurationError(
                "mixed_precision='fp16' scales the loss and divides the gradients itself. Remove torch.amp.GradScaler: "
                "call accelerator.backward(loss) and optimizer.step()."
            )
        if not self.gradient_state.sync_gradients:
            raise ConfigurationError(
                "torch.amp.GradScaler.step divides the gradients of a micro batch that does not end its accumulation "
                "window, and would divide them again with those of the next one. Call its unscale_, step and update "
                "only if accelerator.sync_gradients, or remove it and set mixed_precision='fp16'."
            )
        return False

    @property
    def step_was_skipped(self) -> bool:
        """True if the last step was skipped: gradients had overflowed, or a replica had failed."""
        return self._is_overflow

    def __getattr__(self, name: str) -> Any:
        # Optimizers of other libraries have further methods. `optimizer` itself is missing only while unpickling.
        if name == "optimizer":
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __getstate__(self) -> dict[str, Any]:
        left_out = ("gradient_state", "_treat", "_cleared_in", "_stepped_in", "averages", "strategy", "accumulation")
        return {key: value for key, value in self.__dict__.items() if key not in left_out}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.gradient_state = GradientState()
        self._treat = None

    def __repr__(self) -> str:
        return f"AcceleratedOptimizer({self.optimizer!r})"


def warn_about_gradients(optimizer: Optimizer, state: GradientState) -> None:
    """Warn if an optimizer has no gradients in its first step, or gradients that were not scaled for accumulation."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    fused = callable(getattr(optimizer, "fused_backward", None))
    missing = all(parameter.grad is None for parameter in parameters)
    batch = state.micro_batch
    if state.num_steps > 1 and not missing and (batch.backwards == 0 if batch is not None else not state.batch_used):
        warn_once(
            __name__,
            f"gradient_accumulation_steps={state.num_steps}, but the gradients of the first step are not from "
            "accelerator.backward(loss), which divides the loss by the steps. Call it in place of loss.backward(), in "
            "`with accelerator.accumulate(model):`.",
        )
    if parameters and not fused and missing:
        warn_once(
            __name__,
            f"{type(optimizer).__name__}.step found no gradient in any of its {len(parameters)} parameters, so it "
            "changes nothing. Create the optimizer from the parameters of the model whose loss is computed.",
        )


def patch_optimizer_step(accelerated_optimizer: AcceleratedOptimizer, method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a step method that sets ``accelerated_optimizer._step_called`` when it is called."""

    @functools.wraps(method)
    def patched_step(*args: Any, **kwargs: Any) -> Any:
        accelerated_optimizer._step_called = True
        return method(*args, **kwargs)

    return patched_step


def move_to_device(state: Any, device: torch.device) -> Any:
    """Nested optimizer state with its tensors on ``device``."""
    return send_to_device(state, device)


def _with_average_loss(closure: Callable[[], Any], collectives: Collectives) -> Callable[[], Any]:
    """Return a closure whose loss is averaged over the ranks, by which optimizers decide how far to go."""

    def averaged() -> Any:
        loss = closure()
        return loss if loss is None else average_over_ranks(loss, collectives)

    return averaged


def average_over_ranks(value: Any, collectives: Collectives) -> Any:
    """Return the mean of each rank's number, so that all ranks decide alike; on one rank the number itself."""
    if collectives.world_size == 1:
        return value
    dtype = value.dtype if isinstance(value, torch.Tensor) else torch.float64
    total = torch.as_tensor(value, dtype=dtype, device=PartialState().device).detach().clone()
    return collectives.all_reduce(total) / collectives.world_size

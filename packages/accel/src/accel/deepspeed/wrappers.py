"""DeepSpeed's engine, and the optimizer and scheduler in it, in the form in which a prepared loop uses them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer

from accel_state.errors import ConfigurationError

from ..optimizer import AcceleratedOptimizer
from ..scheduler import AcceleratedScheduler
from . import gradients


class DeepSpeedEngineWrapper:
    """One engine: when it reduces gradients, and when it steps.

    Args:
        engine: what ``deepspeed.initialize`` returned.
    """

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.configured_clipping = float(engine.gradient_clipping() or 0.0)
        self.no_sync_depth = 0
        self._has_gradients = False
        self._norm: float | None = None

    def set_boundary(self, is_boundary: bool | None) -> bool:
        """Say whether the next backward pass ends an accumulation window; None leaves it to the engine, which counts its own steps.

        Returns:
            Whether it does.
        """
        self.engine.set_gradient_accumulation_boundary(False if self.no_sync_depth else is_boundary)
        return bool(self.engine.is_gradient_accumulation_boundary())

    def backward(self, loss: torch.Tensor, sync_gradients: bool = True, **kwargs: Any) -> None:
        """Compute gradients, from a loss that is weighed for accumulation already.

        Args:
            loss: the loss, a scalar.
            sync_gradients: whether this backward pass ends an accumulation window.
            **kwargs: ``retain_graph``.
        """
        self.set_boundary(sync_gradients)
        self.run_backward(loss, **kwargs)

    def run_backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Compute gradients, with the boundary as it was set.

        Raises:
            ConfigurationError: an argument that the engine does not know.
        """
        unknown = sorted(set(kwargs) - {"retain_graph"})
        if unknown:
            raise ConfigurationError(f"backward got {', '.join(unknown)}, which DeepSpeed's engine does not know. It takes retain_graph.")
        self.engine.backward(loss, scale_wrt_gas=False, **kwargs)
        self._has_gradients = True

    @contextmanager
    def taking_part(self) -> Iterator[None]:
        """A block in which another engine runs a backward pass that computes this one's gradients too.

        By itself this engine would count each of its forward passes as a backward pass of its own. So it is told what its own
        ``backward`` tells it: that one is running, and, at the end, that it is over.

        Raises:
            ConfigurationError: this version of DeepSpeed computes gradients for one engine at a time.
        """
        engine = self.engine
        if not hasattr(engine, "_running_engine_backward_count"):
            raise ConfigurationError(
                "the loss depends on several models that are trained, and this version of DeepSpeed computes gradients for one engine at a "
                "time. Upgrade: pip install 'deepspeed>=0.19'."
            )
        self._count_backward(1)
        try:
            yield
            engine._backward_epilogue()
        finally:
            self._count_backward(-1)
        self._has_gradients = True

    def _count_backward(self, change: int) -> None:
        engine = self.engine
        with engine._running_engine_backward_lock:
            engine._running_engine_backward_count += change
            engine._running_engine_backward = engine._running_engine_backward_count > 0

    def step(self) -> bool | None:
        """Update the weights if a window has ended.

        Returns:
            Whether they were updated; None if no window has ended, and False if gradients had overflowed.
        """
        if not self._has_gradients:
            return None
        ends_window = bool(self.engine.is_gradient_accumulation_boundary())
        self.engine.step()
        if not ends_window:
            return None
        self._has_gradients = False
        self._norm = None
        gradients.set_clipping(self.engine, self.configured_clipping)
        return bool(self.engine.was_step_applied())

    def discard_gradients(self) -> None:
        """Forget the gradients of the current window; nothing once they have been used."""
        if not self._has_gradients:
            return
        for tensor in gradients.held(self.engine):
            tensor.zero_()
        self.engine.optimizer.zero_grad()
        self._has_gradients = False
        self._norm = None

    @property
    def has_whole_window(self) -> bool:
        """Whether gradients of a window that has ended wait for the step."""
        return self._has_gradients and bool(self.engine.is_gradient_accumulation_boundary())

    def measure(self) -> float | None:
        """The global norm of the gradients that wait for the step; None if there are none. Every rank must call it."""
        if not self.has_whole_window:
            return None
        if self._norm is None:
            found = gradients.norm(self.engine)
            self._norm = None if found is None else float(found)
        return self._norm

    def get_global_grad_norm(self) -> float | None:
        """The global norm of the gradients that wait for the step, or else of the last step; None before the first."""
        found = self.measure()
        if found is None:
            found = self.engine.get_global_grad_norm()
        return None if found is None else float(found)


class DeepSpeedOptimizerWrapper(AcceleratedOptimizer):
    """The optimizer of an engine.

    ``step`` has the engine step, which clips gradients, updates weights, and clears the gradients.

    Args:
        optimizer: the engine's optimizer.
        wrapper: the engine; None for an optimizer that another part of the script steps.
        given: what the script passed to ``prepare``.
    """

    def __init__(self, optimizer: Any, wrapper: DeepSpeedEngineWrapper | None = None, given: Any = None) -> None:
        super().__init__(optimizer, device_placement=False, scaler=None)
        self.engine_wrapper = wrapper
        self.given = given

    @property
    def defaults(self) -> dict[str, Any]:
        """The default settings of the optimizer inside."""
        return self._innermost.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self._innermost.defaults = defaults

    @property
    def _innermost(self) -> Optimizer:
        inner = self.optimizer
        while not isinstance(inner, Optimizer) and hasattr(inner, "optimizer"):
            inner = inner.optimizer
        return inner

    def wraps(self, optimizer: Any) -> bool:
        """Whether this is the prepared form of an optimizer."""
        return super().wraps(optimizer) or optimizer is self.given or optimizer is self._innermost

    def share_groups(self) -> None:
        """Have the script's optimizer, whose schedulers set its learning rates, share the parameter groups of the one in the engine.

        They are two where DeepSpeed has a form of its own, and loading a state makes new groups.
        """
        if isinstance(self.given, Optimizer):
            self.given.param_groups = self._innermost.param_groups

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: the engine has divided the parameters.

        Raises:
            ConfigurationError: always.
        """
        raise ConfigurationError(
            "DeepSpeed divides an optimizer's parameters when it is prepared, so none can be added later. Add the group before prepare(), "
            "with parameters that are frozen until then if need be."
        )

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters, unless gradients are still being accumulated.

        Raises:
            ConfigurationError: there is a closure, which the engine cannot call.
        """
        if closure is not None:
            raise ConfigurationError("DeepSpeed's engine steps without a closure. Call accelerator.backward(loss), and then step().")
        if self.engine_wrapper is None:
            return None
        applied = self.engine_wrapper.step()
        if applied is not None:
            self._is_overflow = not applied
            self.steps_taken += applied
        return None

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear the gradients of a window that was not stepped with; those of a step the engine has cleared itself."""
        if self.gradient_state.sync_gradients and self.engine_wrapper is not None:
            self.engine_wrapper.discard_gradients()


class DeepSpeedSchedulerWrapper(AcceleratedScheduler):
    """A scheduler of the DeepSpeed configuration, which the engine advances whenever it steps.

    Args:
        scheduler: the engine's scheduler.
        optimizers: the prepared optimizer, or several of them.
    """

    def __init__(self, scheduler: Any, optimizers: AcceleratedOptimizer | Sequence[AcceleratedOptimizer]) -> None:
        super().__init__(scheduler, optimizers, step_with_optimizer=True, split_batches=True)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: the engine has advanced it."""

"""Data parallelism: a full model on every rank, and averaged gradients."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join, Joinable
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from accel_state import PartialState, get_logger
from accel_state.collectives.single import Collectives
from accel_state.errors import ConfigurationError

from .._torch_compat import check_reducer, get_backend
from ..contract.strategy import Strategy
from ..core.max_norm import refuse_max_norm
from ..core.quantized_layers import start_with_scales_of_rank_0
from ..kwargs.base import Handlers
from ..kwargs.ddp import DDPCommunicationHookType, DistributedDataParallelKwargs
from ..reduction.shard_reduction import ShardReduction
from .comm_hook import CommHookState
from .first_calls import FirstCalls
from .unreduced import UnreducedGradients

logger: Final = get_logger(__name__)
_SHOWN_NAMES = 8


class DistributedDataParallel(TorchDDP):
    """DDP whose errors name the next step, and whose first calls are checked."""

    first_calls: FirstCalls | None = None
    gradients: UnreducedGradients | None = None
    comm_hook: CommHookState | None = None
    comm_hook_name: str = ""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # As the reducer numbers them; some may be frozen later.
        self._reduced_names: list[str] = [
            name
            for name, parameter in self.module.named_parameters()
            if parameter.requires_grad and name not in self.parameters_to_ignore
        ]
        self._free_the_backend_last()

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()
        del state["process_group_backend"]
        return state

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        super().__setstate__(state)
        self._free_the_backend_last()

    def _free_the_backend_last(self) -> None:
        """Keep a reference to the process group's backend that outlives the reducer's: attributes are freed in order.

        After ``destroy_process_group()`` the last reference ends gloo's threads and waits for them. Python's does it
        without the GIL; the reducer's with it, forever if such a thread needs the GIL to free a tensor.
        """
        self.process_group_backend: Any = get_backend(self.process_group, self.device)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        calls = self.first_calls
        is_training = calls is not None and self.training and torch.is_grad_enabled()
        if calls is not None and is_training and not calls.next((*args, *kwargs.values())):
            self.first_calls = None
        synchronises = arms = self.require_backward_grad_sync
        if self.gradients is not None and torch.is_grad_enabled():
            arms = self.gradients.arms(self)
            if self.comm_hook is not None:
                self.comm_hook.is_used |= arms
        if arms == synchronises:
            with self._explained():
                return super().__call__(*args, **kwargs)
        self.require_backward_grad_sync = arms
        try:
            with self._explained():
                return super().__call__(*args, **kwargs)
        finally:
            self.require_backward_grad_sync, self.require_forward_param_sync = synchronises, True

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Register a communication hook, as in torch; its state is saved with the run's."""
        super().register_comm_hook(state, hook)
        self.comm_hook_name = getattr(hook, "__name__", type(hook).__name__)
        if state is not None and not isinstance(state, dist.ProcessGroup):
            self.comm_hook = CommHookState(state)

    def save_comm_hook(self) -> dict[str, Any] | None:
        """Return what the communication hook keeps on this rank; None without such a hook."""
        return None if self.comm_hook is None else self.comm_hook.capture(self)

    def load_comm_hook(self, saved: dict[str, Any] | None) -> None:
        """Restore what :meth:`save_comm_hook` has returned on this rank. Every rank must call it."""
        if self.comm_hook is None:
            return
        if saved is None:
            logger.warning(
                "The communication hook starts over: the checkpoint has no state of it for rank %d of %d. A run on "
                "the same number of processes continues with what the hook has kept.",
                dist.get_rank(),
                dist.get_world_size(),
            )
            return
        self.comm_hook.restore(self, saved)

    def check_reduced(self) -> None:
        """Raise RuntimeError if the last backward pass did not reach all parameters, so that none was reduced."""
        with self._explained():
            check_reducer(self)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if "Expected to have finished reduction" not in str(error):
                raise
            found = re.search(r"did not receive grad for rank \d+: ((?:\d+ ?)+)", str(error))
            unused = [self._reduced_names[int(index)] for index in found[1].split()] if found is not None else []
            more = f" and {len(unused) - _SHOWN_NAMES} more" if len(unused) > _SHOWN_NAMES else ""
            raise RuntimeError(
                f"{', '.join(unused[:_SHOWN_NAMES]) or 'some parameters'}{more} did not take part in the loss of the "
                "last step, and DDP waits for their gradients. If that is intended: Accelerator(kwargs_handlers=["
                f"DistributedDataParallelKwargs(find_unused_parameters=True)]). {error}"
            ) from None

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            inner = self.__dict__.get("_modules", {}).get("module")
            if inner is None or not hasattr(inner, name):
                raise
        raise AttributeError(
            f"{type(self).__name__} has no attribute {name!r}, the {type(inner).__name__} in it has: use "
            f"accelerator.unwrap_model(model).{name}. To train, call the prepared model itself, because gradients are "
            "synchronised in its forward only."
        )


class DDPStrategy(Strategy):
    """``torch.nn.parallel.DistributedDataParallel`` around each model with trainable parameters.

    Attributes:
        wrapper_class: wraps a model; called with the arguments of DistributedDataParallel.
    """

    wrapper_class: Callable[..., nn.Module] = DistributedDataParallel
    skips_gradient_sync = True
    supports_elastic = True
    trains_nf4 = True
    checkpoints_blocks = True
    averages_weights = True
    _in_order = False

    def attach(self, state: PartialState, handlers: Handlers) -> None:
        super().attach(state, handlers)
        # The key is what prepare returns.
        self._gradients: weakref.WeakKeyDictionary[nn.Module, UnreducedGradients] = weakref.WeakKeyDictionary()

    def reduce_in_order(self) -> ShardReduction:
        hook = self.handlers.get(DistributedDataParallelKwargs).comm_hook
        if hook != DDPCommunicationHookType.NO:
            raise ConfigurationError(
                "deterministic_reduction=True reduces gradients without DDP's reducer, so that "
                f"comm_hook={str(hook)!r} would have no effect. Remove one of them."
            )
        self._in_order = True
        return ShardReduction(self.averaging_collectives)

    @property
    def matrix_collectives(self) -> Collectives:
        return self.state.collectives

    def axis_rank(self, axis: str) -> int:
        return self.state.process_index if axis == "dp_replicate" else 0

    def check_model(self, model: nn.Module) -> None:
        if self.state.num_processes > 1:
            refuse_max_norm(model)
        devices = set(map(str, getattr(model, "hf_device_map", {}).values()))
        if len(devices) > 1:
            raise ConfigurationError(
                f"the model was loaded with a device map over {sorted(devices)}, but data parallelism needs the full "
                "model on the device of each process. Load it with device_map={'': accelerator.device}, or start one "
                "process."
            )

    def wrap(self, model: nn.Module) -> nn.Module:
        # DDP raises for models without trainable parameters.
        if self.is_wrapped(model):
            return model
        if not any(parameter.requires_grad for parameter in model.parameters()):
            if not self._in_order:
                self._gradients[model] = UnreducedGradients(model, self.state.collectives)
            return model
        settings = self.handlers.get(DistributedDataParallelKwargs)
        device = self.state.device
        ids = None if device.index is None else [device.index]
        arguments = settings.ddp_arguments()
        if self._in_order:
            arguments.pop("static_graph", None)  # the reducer, which records the graph, is not used
        start_with_scales_of_rank_0(model, self.state.collectives)
        wrapped: Any = self.wrapper_class(model, device_ids=ids, output_device=device.index, **arguments)
        settings.register_comm_hook(wrapped)
        if self._in_order:
            # The gradients are reduced after the backward pass, so DDP only copies the weights of rank 0 to all.
            wrapped.require_backward_grad_sync = False
            return wrapped
        wrapped.first_calls = FirstCalls(self.state.process_index)
        if isinstance(wrapped, DistributedDataParallel):
            wrapped.gradients = self._gradients[wrapped] = UnreducedGradients(wrapped, self.state.collectives)
        return wrapped

    def is_wrapped(self, model: nn.Module) -> bool:
        return isinstance(model, TorchDDP)

    def backward(self, loss: torch.Tensor, in_window: bool, **kwargs: Any) -> None:
        begun = [(model, gradients, gradients.before(model)) for model, gradients in self._gradients.items()]
        super().backward(loss, in_window, **kwargs)
        for model, gradients, before in begun:
            if before is not None:
                gradients.after(model, before)

    def check_reduced(self, model: nn.Module) -> None:
        wrapper = next((module for module in model.modules() if isinstance(module, DistributedDataParallel)), None)
        if wrapper is not None:
            wrapper.check_reduced()

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        if isinstance(model, TorchDDP):
            return model.no_sync()
        gradients = self._gradients.get(model)
        return nullcontext() if gradients is None else _without_sync(gradients)

    @contextmanager
    def sync_in_backward(self, model: nn.Module) -> Iterator[None]:
        if not isinstance(model, TorchDDP):
            yield
            return
        before = model.require_backward_grad_sync, model.require_forward_param_sync
        model.require_backward_grad_sync = model.require_forward_param_sync = True
        # The forward under no_sync did not prepare the reducer.
        model.reducer.prepare_for_backward([])
        if model in self._gradients:
            self._gradients[model].is_armed = True
        try:
            yield
        finally:
            model.require_backward_grad_sync, model.require_forward_param_sync = before

    @contextmanager
    def join(self, models: list[Any]) -> Iterator[None]:
        joinables = [model for model in models if isinstance(model, Joinable)]
        for gradients in self._gradients.values():
            gradients.refuses = (
                "in join_uneven_inputs, ranks that have left the loop only take part in DDP's own averages: parameters "
                "must not be unfrozen or added after prepare(), and the loss must be computed with the prepared model."
            )
        try:
            with Join(joinables, enable=True, throw_on_early_termination=False):
                yield
        finally:
            for gradients in self._gradients.values():
                gradients.refuses = ""


@contextmanager
def _without_sync(gradients: UnreducedGradients) -> Iterator[None]:
    former, gradients.sync = gradients.sync, False
    try:
        yield
    finally:
        gradients.sync = former

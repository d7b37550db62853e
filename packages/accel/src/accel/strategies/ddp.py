"""Data parallelism: a full model on every rank, and averaged gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.join import Join, Joinable
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from accel_state import PartialState
from accel_state.collectives.single import Collectives
from accel_state.errors import ConfigurationError

from .._torch_compat import check_reducer
from ..contract.strategy import Strategy
from ..core.quantized_layers import start_with_scales_of_rank_0
from ..kwargs.base import Handlers
from ..kwargs.ddp import DDPCommunicationHookType, DistributedDataParallelKwargs
from ..reduction.shard_reduction import ShardReduction
from .first_calls import FirstCalls
from .frozen import FrozenParameters


class DistributedDataParallel(TorchDDP):
    """DDP whose errors name the next step, and whose first calls are checked."""

    first_calls: FirstCalls | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._reduced = [name for name, item in self.module.named_parameters() if item.requires_grad]
        self._free_the_process_group_last()

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        super().__setstate__(state)
        self._free_the_process_group_last()

    def _free_the_process_group_last(self) -> None:
        """Let Python's reference to the process group outlive the reducer's: attributes are freed in their order.

        After ``destroy_process_group()`` the last reference ends gloo's threads and waits for them. Python's does it
        without the GIL; the reducer's with it, for ever if such a thread needs the GIL to free a tensor.
        """
        self.__dict__["process_group"] = self.__dict__.pop("process_group")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        calls = self.first_calls
        if (
            calls is not None
            and self.training
            and torch.is_grad_enabled()
            and not calls.next((*args, *kwargs.values()))
        ):
            self.first_calls = None
        with self._explained():
            return super().__call__(*args, **kwargs)

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
            frozen = next((name for name in self._reduced if not self.module.get_parameter(name).requires_grad), None)
            if frozen is not None:
                raise ConfigurationError(
                    f"{frozen} was trained when its {type(self).__name__} was prepared and is frozen now, and DDP "
                    "waits for its gradient. Freeze it before prepare(), use FSDP 2, or Accelerator(kwargs_handlers=["
                    "DistributedDataParallelKwargs(find_unused_parameters=True)])."
                ) from error
            raise RuntimeError(
                "some parameters did not take part in the loss of the last step, and DDP waits for their gradients. If "
                "that is intended: Accelerator(kwargs_handlers=[DistributedDataParallelKwargs("
                f"find_unused_parameters=True)]). {error}"
            ) from error

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
    _in_order = False

    def attach(self, state: PartialState, handlers: Handlers) -> None:
        super().attach(state, handlers)
        self._frozen = FrozenParameters()

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
            self._frozen.remember(model, model)
            return model
        settings = self.handlers.get(DistributedDataParallelKwargs)
        device = self.state.device
        ids = None if device.index is None else [device.index]
        arguments = settings.ddp_arguments()
        start_with_scales_of_rank_0(model, self.state.collectives)
        wrapped: Any = self.wrapper_class(model, device_ids=ids, output_device=device.index, **arguments)
        settings.register_comm_hook(wrapped)
        if self._in_order:
            # The gradients are reduced after the backward pass, so DDP only copies the weights of rank 0 to all.
            wrapped.require_backward_grad_sync = False
            return wrapped
        wrapped.first_calls = FirstCalls(self.state.process_index)
        self._frozen.remember(wrapped, model)
        return wrapped

    def is_wrapped(self, model: nn.Module) -> bool:
        return isinstance(model, TorchDDP)

    def backward(self, loss: torch.Tensor, in_window: bool, **kwargs: Any) -> None:
        self._frozen.check("DDP")
        super().backward(loss, in_window, **kwargs)

    def check_reduced(self, model: nn.Module) -> None:
        wrapper = next((module for module in model.modules() if isinstance(module, DistributedDataParallel)), None)
        if wrapper is not None:
            wrapper.check_reduced()

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        return model.no_sync() if isinstance(model, TorchDDP) else nullcontext()

    @contextmanager
    def sync_in_backward(self, model: nn.Module) -> Iterator[None]:
        if not isinstance(model, TorchDDP):
            yield
            return
        before = model.require_backward_grad_sync, model.require_forward_param_sync
        model.require_backward_grad_sync = model.require_forward_param_sync = True
        # The forward under no_sync did not prepare the reducer.
        model.reducer.prepare_for_backward([])
        try:
            yield
        finally:
            model.require_backward_grad_sync, model.require_forward_param_sync = before

    def join(self, models: list[Any]) -> AbstractContextManager[None]:
        joinables = [model for model in models if isinstance(model, Joinable)]
        return Join(joinables, enable=True, throw_on_early_termination=False)

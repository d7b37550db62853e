"""What a strategy does for a model; the base class is the complete behaviour of one process.

What not every strategy can do is a small protocol of its own: callers ask for the capability, never for a name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import nn
from torch.optim import Optimizer

from accel_state import DistributedType, GradientAccumulationPlugin, PartialState
from accel_state.collectives.single import Collectives

from ..core.unwrap import clean_name, extract_model_from_parallel, parameter_state_dict

if TYPE_CHECKING:
    from ..checkpoint.loader import StateReader
    from ..core.prepare import Preparation
    from ..fsdp.checkpoint.files import Gathered
    from ..fsdp.checkpoint.state_dicts import Layout
    from ..kwargs.base import Handlers
    from ..precision.scaler import SharedGradScaler


@runtime_checkable
class SkipsGradientSync(Protocol):
    """Can leave gradients unsynchronised for a while, and synchronise what has been accumulated later."""

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Let backward passes in the block accumulate locally."""

    def sync_in_backward(self, model: nn.Module) -> AbstractContextManager[None]:
        """Synchronise in backward passes in the block, although their forward ran under :meth:`no_sync`."""


@runtime_checkable
class JoinsUnevenInputs(Protocol):
    """Can keep ranks without data in step with those that still have some."""

    def join(self, models: list[Any]) -> AbstractContextManager[None]:
        """Let ranks leave the block's loop at different times."""


@runtime_checkable
class PreparesTogether(Protocol):
    """Makes one thing of a model and its optimizer, so both have to be prepared in one call."""

    def prepare_together(self, objects: list[Any], preparation: Preparation) -> list[Any]:
        """The objects, with prepared ones in place of those that belong together; these are noted in ``preparation``."""


@runtime_checkable
class OwnsBackward(Protocol):
    """Has engines that run the backward pass themselves."""

    def backward(self, loss: torch.Tensor, in_window: bool, **kwargs: Any) -> None:
        """Compute gradients of a loss that is weighed already; ``in_window``: within ``accumulate``."""


@runtime_checkable
class ReadsItsOwnState(Protocol):
    """Has engines that load what they have saved."""

    def plan_state(
        self, reader: StateReader, models: Sequence[nn.Module], options: dict[str, Any]
    ) -> list[Callable[[], Any]]:
        """What puts the states of models and optimizers in place; every rank must call that, in this order.

        Args:
            reader: the checkpoint.
            models: those to load, of the prepared ones.
            options: the caller's, such as ``strict``.
        """


class Strategy:
    """Wrapping, gradients and weights of models in one process.

    Args:
        state: rank, world and device.
        handlers: the settings given to the Accelerator.
        settings: the plugin of this strategy, of those that have one.

    Attributes:
        distributed_type: what ``accelerator.distributed_type`` says where this strategy trains; None: what the devices
            say.
        trains_alone: whether it does something for a single process, without a process group.
        holds_gradients: whether gradients that accumulate are in engines, and not in ``parameter.grad``.
        data_mesh: the mesh whose axes say which ranks get the same samples; None where each gets samples of its own.
    """

    distributed_type: DistributedType | None = None
    trains_alone: ClassVar[bool] = True
    holds_gradients: ClassVar[bool] = False
    data_mesh: Any = None

    def __init__(self, state: PartialState, handlers: Handlers, settings: Any = None) -> None:
        self.state = state
        self.handlers = handlers
        self.settings = settings

    def axis_rank(self, axis: str) -> int:
        """This process's coordinate on a mesh axis ("dp_replicate", "dp_shard", "tp", "cp", "sp", "pp"); 0 on an axis
        of size 1.
        """
        return 0

    @property
    def companions(self) -> Mapping[str, Any]:
        """Settings of other engines that are in use here, by the engine's name."""
        return {}

    @property
    def data_collectives(self) -> Collectives:
        """The communication of this process with those that get other samples; ranks that share each other's samples
        are no part of it.
        """
        return self.state.collectives

    @property
    def averaging_collectives(self) -> Collectives:
        """The communication of the processes over which losses and gradients are averaged: their tokens differ."""
        return self.state.collectives

    def share_generators(self) -> None:
        """Give processes that compute the same thing the same random numbers; called when generators have been put
        back.
        """

    def computes_in(self, mixed_precision: str) -> bool:
        """Whether the strategy itself computes in a precision, so that nothing is put around a model's forward."""
        return False

    def accumulation(self, plugin: GradientAccumulationPlugin) -> GradientAccumulationPlugin:
        """The settings of gradient accumulation, where those of the strategy have a say."""
        return plugin

    def check_model(self, model: nn.Module) -> None:
        """Refuse a model that this strategy cannot train."""

    def place(self, model: nn.Module) -> nn.Module:
        """Move a model to this process's device."""
        return model.to(self.state.device)

    def wrap(self, model: nn.Module) -> nn.Module:
        """Make a model ready for training; it is on its device."""
        return model

    def adopt_optimizer(self, optimizer: Optimizer) -> None:
        """Let an optimizer update what wrapping has made of its parameters; called for each prepared one after each
        wrapping.
        """

    def is_wrapped(self, model: nn.Module) -> bool:
        """Whether a model has been through :meth:`wrap`."""
        return False

    def unwrap(self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True) -> nn.Module:
        """The user's model inside."""
        return extract_model_from_parallel(model, keep_fp32_wrapper, keep_torch_compile)

    def adopt_scaler(self, scaler: SharedGradScaler) -> None:
        """Let the loss scale know whether ranks have different parts of the gradients; here each has all of them."""

    def context_parallel(
        self,
        buffers: list[torch.Tensor] | None,
        buffer_seq_dims: list[int] | None,
        no_restore_buffers: set[torch.Tensor] | None,
    ) -> AbstractContextManager[None]:
        """A block in which sequences are shared between processes; here each process has whole sequences."""
        return nullcontext()

    def whole_sequences(self, tensor: torch.Tensor, seq_dim: int = 1) -> torch.Tensor:
        """What was computed from this process's part of sequences, such as logits, for whole sequences in order,
        without a gradient.
        """
        return tensor

    def sequence_parallel_loader(self, loader: Any, model: nn.Module) -> Any:
        """A loader whose sequences are split between processes; here each process has whole sequences."""
        return loader

    def scale_gradients(self, parameters: Iterable[torch.Tensor], factor: float | torch.Tensor) -> None:
        """Multiply the gradients accumulated so far, in place."""
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, factor)

    def gather_gradients(self, model: nn.Module) -> dict[str, torch.Tensor] | None:
        """Gradients accumulated so far of a model that is divided among ranks: whole, averaged over the ranks, by name;
        on rank 0 only.

        Every rank must call it. None where the strategy cannot say; it does not divide models, or does so in a way of
        its own.
        """
        return None

    def gradient_shapes(self, model: nn.Module) -> dict[str, torch.Size]:
        """The shapes of the gradients of a model by name, whole."""
        named = extract_model_from_parallel(model, keep_torch_compile=False).named_parameters()
        return {clean_name(name): parameter.shape for name, parameter in named}

    def drop_gradients(self, model: nn.Module) -> None:
        """Forget what a model has accumulated."""
        extract_model_from_parallel(model).zero_grad(set_to_none=True)

    def put_gradients(self, model: nn.Module, gradients: Mapping[str, torch.Tensor]) -> None:
        """Let whole gradients be what a model has accumulated; parameters without one have none."""
        for name, parameter in extract_model_from_parallel(model, keep_torch_compile=False).named_parameters():
            gradient = gradients.get(clean_name(name))
            parameter.grad = None if gradient is None else gradient.to(parameter.device, parameter.dtype, copy=True)

    def clip_grad_norm(self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float) -> torch.Tensor:
        """Clip the global gradient norm; returns the norm before clipping, equal on all ranks."""
        return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type=norm_type)

    def clip_grad_value(self, parameters: Iterable[torch.Tensor], clip_value: float) -> None:
        """Clip each gradient element to ``[-clip_value, clip_value]``."""
        nn.utils.clip_grad_value_(parameters, clip_value)

    def weights_to_save(self, model: nn.Module) -> dict[str, Any]:
        """What of a model goes into a checkpoint. Every rank must call it."""
        return self.state_dict(model)

    def gather_state(
        self, models: Sequence[nn.Module], weights: Sequence[dict[str, Any]], optimizers: Sequence[Optimizer]
    ) -> Gathered | None:
        """Models and optimizers in files of this strategy's own; None: each as a whole. Every rank must call it.

        Args:
            models: the prepared models.
            weights: of each, as :meth:`weights_to_save` gave them, without those that somebody else has saved.
            optimizers: those that were prepared.
        """
        return None

    def layout(self, model: nn.Module) -> Layout:
        """How a model's tensors lie on the ranks, for reading them from files of any strategy. Every rank must call it."""
        from ..fsdp.checkpoint.state_dicts import Layout, tied_names

        whole = extract_model_from_parallel(model, keep_torch_compile=False)
        tensors = {
            name: value for name, value in parameter_state_dict(whole).items() if isinstance(value, torch.Tensor)
        }
        return Layout(whole, tensors, tied_names(whole))

    def parameter_names(self, model: nn.Module, optimizer: Optimizer) -> list[str]:
        """The names of an optimizer's parameters, in the order in which its state counts them."""
        from ..fsdp.checkpoint.state_dicts import names_in_order

        return names_in_order(extract_model_from_parallel(model, keep_torch_compile=False), optimizer)

    @property
    def divides_models(self) -> bool:
        """Whether ranks hold parts of a model's tensors."""
        return False

    def state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """The model's state, under the names of the user's own model unless ``unwrap`` is off."""
        return parameter_state_dict(self.unwrap(model, keep_torch_compile=False)) if unwrap else model.state_dict()

    def forget(self) -> None:
        """Drop references to prepared objects."""

    def close(self) -> None:
        """Let go of what must be gone before the process group."""


def no_sync_context(strategy: Strategy, model: nn.Module) -> AbstractContextManager[None]:
    """``no_sync`` where the strategy can, else nothing."""
    return strategy.no_sync(model) if isinstance(strategy, SkipsGradientSync) else nullcontext()

"""The interface of a strategy; the base class implements it completely for one process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from operator import attrgetter
from typing import Any, ClassVar, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from accel_state import DistributedType, GradientAccumulationPlugin, PartialState
from accel_state.collectives.single import Collectives
from accel_state.errors import ConfigurationError

from .._torch_compat import foreach_mul_
from ..core.placing import makes_parameters, move_in_place
from ..core.types import Gathered, Layout
from ..core.unwrap import (
    clean_name,
    extract_model_from_parallel,
    innermost_model,
    names_in_order,
    parameter_state_dict,
    tied_names,
    trainable_names,
)
from ..kwargs.base import Handlers
from ..precision.scaler import SharedGradScaler
from ..reduction.shard_reduction import ShardReduction
from .accumulated_gradients import AccumulatedGradients
from .replicas import Replicas


class Plugin(Protocol):
    """The settings of a strategy. Without arguments, its class takes the launcher's values."""

    @property
    def strategy(self) -> str:
        """The registered name of the strategy that this configures."""


class Strategy:
    """Wraps models, synchronises and clips gradients, and collects weights.

    A subclass overrides the hooks in which it differs from training in one process. Callers check the capabilities
    below and never the class or the name of a strategy.

    Args:
        state: rank, world size and device; None for an object that is passed to the Accelerator, which attaches it.
        handlers: the settings given to the Accelerator as ``kwargs_handlers``.
        settings: the strategy's plugin, if it has one; None takes :meth:`default_settings`.

    Attributes:
        distributed_type: what ``accelerator.distributed_type`` reports; None reports the type of the devices.
        supports_single_process: whether the strategy works without a process group.
        supports_several_processes: whether it works with one; otherwise each rank would train a model of its own.
        skips_gradient_sync: whether :meth:`no_sync` leaves gradients unsynchronised.
        supports_elastic: whether models can be trained with elastic loaders, whose micro batches make one step.
        trains_nf4: whether models with weights in torchao's NF4 have been compared with it.
        checkpoints_blocks: whether ``ActivationCheckpointingKwargs`` has been compared with it.
        averages_weights: whether moving averages of weights have been compared with one process.
        batches_per_process: how many batches of a loader this process computes at once, one for each part of its
            devices.
        shards_parameters: whether ranks hold parts of a model's tensors.
        uses_engine: whether an engine (such as DeepSpeed's) holds the gradients, runs the backward pass, and saves and
            loads its own state; see :meth:`backward` and :meth:`plan_state`.
        supports_compilation: whether prepared models can be compiled.
        gradients: discards, saves and restores accumulated gradients.
        replicas: what strategies decide whose replicas join and leave a run; None for all others.
        data_mesh: the device mesh whose axes define which ranks get the same samples; None if every rank gets its own.
        before_step: called with an optimizer of torch before it steps, on all ranks; None if there is nothing to do.
    """

    distributed_type: DistributedType | None = None
    supports_single_process: ClassVar[bool] = True
    supports_several_processes: ClassVar[bool] = True
    skips_gradient_sync: ClassVar[bool] = False
    supports_elastic: ClassVar[bool] = False
    trains_nf4: ClassVar[bool] = False
    checkpoints_blocks: ClassVar[bool] = False
    uses_engine: ClassVar[bool] = False
    supports_compilation: ClassVar[bool] = True
    averages_weights: bool = False
    batches_per_process: int = 1
    shards_parameters: bool = False
    data_mesh: Any = None
    gradients: AccumulatedGradients = AccumulatedGradients()
    replicas: Replicas | None = None
    before_step: Callable[[Optimizer], None] | None = None

    state: PartialState
    handlers: Handlers

    def __init__(
        self, state: PartialState | None = None, handlers: Handlers | None = None, settings: Any = None
    ) -> None:
        self.settings: Any = self.default_settings() if settings is None else settings
        if state is not None and handlers is not None:
            self.attach(state, handlers)

    def default_settings(self) -> Any:
        """Return the plugin with the launcher's values, for a strategy that is given by name.

        None if there is no plugin.
        """
        return None

    def attach(self, state: PartialState, handlers: Handlers) -> None:
        """Join a run: what needs the process group, the device or the precision is set up here, once.

        The constructor calls it, or the Accelerator for a strategy object that was created before.

        Raises:
            ConfigurationError: the strategy cannot train here.
        """
        self.state = state
        self.handlers = handlers

    # -- topology ----------------------------------------------------------------------------------------------------

    def axis_rank(self, axis: str) -> int:
        """Return this process's coordinate on a mesh axis ("dp_replicate", "dp_shard", "tp", "cp", "sp", "pp").

        It is 0 on an axis of size 1.
        """
        return 0

    @property
    def active_plugins(self) -> Mapping[str, Any]:
        """The plugins in use, by name, which ``accelerator.state.plugins`` has: by default this strategy's own."""
        name = getattr(self.settings, "strategy", None)
        return {} if name is None else {name: self.settings}

    @property
    def data_collectives(self) -> Collectives:
        """Collectives over the ranks that get different samples."""
        return self.state.collectives

    @property
    def averaging_collectives(self) -> Collectives:
        """Collectives over the ranks whose losses and gradients are averaged, because their tokens differ."""
        return self.state.collectives

    @property
    def matrix_collectives(self) -> Collectives:
        """Collectives over all ranks that hold parts or copies of a matrix, for optimizers that need it in full (Muon).

        Raises:
            ConfigurationError: such optimizers have not been compared with one process.
        """
        raise ConfigurationError(
            f"Muon has not been compared with one process under {type(self).__name__}. Use it with DDP, FSDP 2 or "
            "tensor parallelism, or train with another optimizer, such as torch.optim.AdamW."
        )

    def share_generators(self) -> None:
        """Synchronise the random generators of ranks that compute the same thing; called after they were restored."""

    # -- sequences that are split over ranks -------------------------------------------------------------------------

    def split_sequences(
        self,
        buffers: list[torch.Tensor] | None,
        seq_dims: list[int] | None,
        no_restore: set[torch.Tensor] | None,
    ) -> AbstractContextManager[None]:
        """Return a block in which buffers are split; see :meth:`accel.Accelerator.maybe_context_parallel`."""
        return nullcontext()

    def whole_sequences(self, tensor: torch.Tensor, seq_dim: int = 1) -> torch.Tensor:
        """Gather what was computed from this rank's part of the sequences, such as logits, without a gradient."""
        return tensor

    def split_loader(self, loader: Any, model: nn.Module) -> Any:
        """Return a loader whose batches hold this rank's part of the sequences."""
        return loader

    # -- models and optimizers ---------------------------------------------------------------------------------------

    def handles_precision(self, mixed_precision: str) -> bool:
        """Return True if the strategy computes in this precision itself, so that the model's forward is not wrapped."""
        return False

    def accumulation(self, plugin: GradientAccumulationPlugin) -> GradientAccumulationPlugin:
        """Return the settings of gradient accumulation to use, given those of the Accelerator."""
        return plugin

    def configure_scaler(self, scaler: SharedGradScaler) -> None:
        """Set up the loss scaler; where ranks hold different parts of the gradients, call ``scaler.share_overflow``."""

    def check_model(self, model: nn.Module) -> None:
        """Raise ConfigurationError for a model that this strategy cannot train."""

    def prepare_together(self, objects: list[Any], preparation: Any) -> list[Any]:
        """Prepare a model together with its optimizer, where the strategy makes one engine of both.

        Args:
            objects: the arguments of ``prepare``, in any order.
            preparation: the :class:`accel.setup.prepare.Preparation`; what is prepared here is added to its lists.

        Returns:
            The objects, with prepared ones in the place of those that were prepared here.
        """
        return objects

    def place(self, model: nn.Module) -> nn.Module:
        """Move a model to this process's device, in place also where torch would make new parameters."""
        device = self.state.device
        elsewhere = set(map(attrgetter("device"), chain(model.parameters(), model.buffers()))) - {device}
        overwrites = torch.__future__.get_overwrite_module_params_on_conversion()
        if (elsewhere or overwrites) and makes_parameters(device):
            return move_in_place(model, device)
        try:
            return model.to(device)
        except NotImplementedError as error:
            empty = next((name for name, tensor in model.state_dict().items() if tensor.is_meta), None)
            if empty is None:
                raise
            raise ConfigurationError(
                f"{type(model).__name__} cannot be prepared: {empty} has no values (it is on the meta device). Load "
                "the weights first, with load_checkpoint_and_dispatch for example, or create the model outside of "
                "init_empty_weights()."
            ) from error

    def wrap(self, model: nn.Module) -> nn.Module:
        """Wrap a model, which is on its device, for training."""
        return model

    def remap_optimizer(self, optimizer: Optimizer) -> None:
        """Point an optimizer at the parameters of the wrapped models.

        Called when an optimizer is prepared, when groups were added to it, and for every prepared optimizer after each
        call of :meth:`wrap`.
        """

    def has_replaced(self, parameter: torch.Tensor) -> bool:
        """Return True if :meth:`wrap` has put another parameter in the place of this one."""
        return False

    def current_parameters(self, parameters: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return parameters with those in place that :meth:`wrap` has put in the place of some."""
        return parameters

    def is_wrapped(self, model: nn.Module) -> bool:
        """Return True if a model was returned by :meth:`wrap`."""
        return False

    def unwrap(self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True) -> nn.Module:
        """Return the user's model inside the wrappers; see :func:`accel.core.unwrap.extract_model_from_parallel`."""
        return extract_model_from_parallel(model, keep_fp32_wrapper, keep_torch_compile)

    def join(self, models: list[Any]) -> AbstractContextManager[None] | None:
        """Return a block in which ranks may leave the loop at different times; None if they cannot."""
        return None

    def forget(self) -> None:
        """Drop references to prepared objects."""

    def finish(self) -> None:
        """Run when training has ended, before saves and trackers are finished."""

    def close(self) -> None:
        """Release what must be released before the process group is destroyed."""

    def gathered_parameters(self, module: nn.Module) -> AbstractContextManager[None]:
        """Gather the parameters of a prepared model, or of a module in it, for the block; see the Accelerator."""
        if self.shards_parameters:
            raise ConfigurationError(
                f"gathered_parameters has not been compared with one process under {type(self).__name__}. Use the "
                "parameters in the model's forward, or train with FSDP 2."
            )
        return nullcontext()

    # -- moving averages of weights ----------------------------------------------------------------------------------

    def averaged_parameters(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """Return the parameters of which this rank averages its parts, by name; see :meth:`reshard`."""
        return {clean_name(name): parameter for name, parameter in innermost_model(model).named_parameters()}

    def updates(self, optimizer: Optimizer, model: nn.Module) -> bool:
        """Return True if a prepared optimizer updates a model, also where it has no parameter of this rank."""
        own = set(map(id, model.parameters()))
        return any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"])

    def averages_written(self, model: nn.Module) -> None:
        """Run after other values were written into :meth:`averaged_parameters`. Every rank must call it."""

    def reshard(self, model: nn.Module) -> None:
        """Free gathered parameters, so that the model has the sharded ones and its next call gathers their values."""

    def average_state(self, average: Any) -> dict[str, Any]:
        """Return what a checkpoint has of a :class:`accel.training.moving_average.MovingAverage`.

        Every rank must call it.
        """
        average.synchronise()
        return dict(average.averages)

    def gather_averages(self, states: Sequence[dict[str, Any]], gathered: Gathered) -> None:
        """Add the results of :meth:`average_state` to those of :meth:`gather_state`. Every rank must call it."""

    def load_average(self, average: Any, state: dict[str, Any], layout: Layout) -> None:
        """Replace averages by those of a checkpoint, which have been checked. Every rank must call it."""
        average.averages.update(state)

    # -- gradients ---------------------------------------------------------------------------------------------------

    def backward(self, loss: torch.Tensor, in_window: bool, **kwargs: Any) -> None:
        """Run the backward pass, for each ``accelerator.backward``.

        Args:
            loss: the loss, scaled for its accumulation window and by the loss scaler.
            in_window: whether it was computed inside ``accumulate``.
            **kwargs: for ``torch.Tensor.backward``.
        """
        try:
            loss.backward(**kwargs)
        except RuntimeError as error:
            explained = self.explain(error, loss)
            if explained is None:
                raise
            raise explained from error

    def explain(self, error: BaseException, loss: torch.Tensor | None = None) -> Exception | None:
        """Return an error that explains one of torch; None if there is nothing to add.

        Args:
            error: what was raised in a step.
            loss: the loss, if its backward pass has raised it.
        """
        return None

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return a block whose backward passes accumulate gradients locally."""
        return nullcontext()

    def reduce_in_order(self) -> ShardReduction:
        """Reduce gradients in an order that does not depend on the number of processes, in models wrapped from now on.

        Raises:
            ConfigurationError: the strategy reduces them in an order of its own.
        """
        raise ConfigurationError(
            "deterministic_reduction=True is available in one process, with DDP, and with FSDP 2 on all processes, and "
            f"this is {type(self).__name__}. Turn it off, or choose one of these."
        )

    def sync_in_backward(self, model: nn.Module) -> AbstractContextManager[None]:
        """Synchronise gradients in backward passes whose forward ran under :meth:`no_sync`."""
        return nullcontext()

    def check_reduced(self, model: nn.Module) -> None:
        """Raise RuntimeError if the last backward pass has left gradients of a model unreduced on this rank.

        For optimizers that communicate: another rank may still wait for this one in its backward pass.
        """

    def check_item_reduction(self, reduction: str) -> None:
        """Raise ConfigurationError where ``backward(loss, num_items=..., reduction=reduction)`` would be wrong."""

    def scale_gradients(self, parameters: Iterable[torch.Tensor], factor: float | torch.Tensor) -> None:
        """Multiply the gradients accumulated so far, in place."""
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if gradients:
            foreach_mul_(gradients, factor)

    def clip_grad_norm(self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float) -> torch.Tensor:
        """Clip the global gradient norm; returns the norm before clipping, equal on all ranks."""
        return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type=norm_type)

    def clip_grad_value(self, parameters: Iterable[torch.Tensor], clip_value: float) -> None:
        """Clip each gradient element to ``[-clip_value, clip_value]``."""
        nn.utils.clip_grad_value_(parameters, clip_value)

    # -- weights and checkpoints -------------------------------------------------------------------------------------

    def state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return the model's state, under the names of the user's own model unless ``unwrap`` is off."""
        return parameter_state_dict(self.unwrap(model, keep_torch_compile=False)) if unwrap else model.state_dict()

    def trainable_state_dict(self, model: nn.Module) -> dict[str, Any]:
        """Return the parameters of :meth:`state_dict` that require gradients.

        Raises:
            ConfigurationError: an engine may hold parameters under other names than those of its state.
        """
        if self.uses_engine:
            raise ConfigurationError(
                f"get_state_dict(trainable_only=True) does not support {type(self).__name__}. Use "
                "get_state_dict(model), which gathers all weights."
            )
        trainable = trainable_names(model)
        return {name: value for name, value in self.state_dict(model).items() if name in trainable}

    def weights_to_save(self, model: nn.Module) -> dict[str, Any]:
        """Return the weights of a model for a checkpoint. Every rank must call it."""
        return self.state_dict(model)

    def gather_state(
        self, models: Sequence[nn.Module], weights: Sequence[dict[str, Any]], optimizers: Sequence[Optimizer]
    ) -> Gathered | None:
        """Models and optimizers in files of the strategy's own format; None saves each as a full state dict.

        Every rank must call it.

        Args:
            models: the prepared models.
            weights: of each model, what :meth:`weights_to_save` returned and no save hook has taken out.
            optimizers: the prepared optimizers.
        """
        return None

    def plan_state(
        self, reader: Any, models: Sequence[nn.Module], options: dict[str, Any]
    ) -> list[Callable[[], Any]] | None:
        """Return the calls that load the engines' own state, which every rank makes in this order.

        None without engines.

        Args:
            reader: the :class:`accel.checkpointer.loader.StateReader` of the checkpoint.
            models: the prepared models to load.
            options: the keyword arguments for loading models, such as ``strict``.
        """
        return None

    def layout(self, model: nn.Module) -> Layout:
        """Return how a model's tensors are distributed, for loading files of any strategy. Every rank must call it."""
        inner = extract_model_from_parallel(model, keep_torch_compile=False)
        state = parameter_state_dict(inner)
        tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
        return Layout(inner, tensors, tied_names(inner))

    def parameter_names(self, model: nn.Module, optimizer: Optimizer) -> list[str]:
        """Return the names of an optimizer's parameters, in the order of its state dict."""
        return names_in_order(extract_model_from_parallel(model, keep_torch_compile=False), optimizer)

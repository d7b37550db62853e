"""The Accelerator: the one object a training script uses. It resolves its arguments once, and delegates."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, ParamSpec, TypeVar, overload

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.hooks import RemovableHandle

from accel_data import DataLoaderConfiguration, PreparedLoader, skip_first_batches
from accel_state import (
    AcceleratorState,
    ConfigurationError,
    DistributedType,
    DynamoBackend,
    GradientAccumulationPlugin,
    GradientState,
    PartialState,
    PrecisionType,
    RNGType,
    get_logger,
    operations,
)
from accel_state.arguments import check_flag, check_number
from accel_state.enums import RNGName
from accel_state.errors import check_type
from accel_state.humanize import counted
from accel_state.memory import release_memory
from accel_state.operations.distributed import Reduction
from accel_state.options import CoreOptions
from accel_state.state.process_control import RunsOnSome
from accel_state.storage.url import Location
from accel_track.base import GeneralTracker
from accel_track.enums import LoggerName, LoggerType
from accel_track.tracking import Settings as TrackerSettings
from accel_track.tracking import TrackerRun

from .checkpointer.checkpointer import Checkpointer, LoadHook, SaveHook
from .contract.optimizer import AcceleratedOptimizer
from .contract.scheduler import AcceleratedScheduler
from .contract.strategy import Plugin, Strategy
from .core import quantized_layers, weights_io
from .core.compile import TorchDynamoPlugin, dynamo_settings
from .core.project import ProjectConfiguration, project_settings
from .core.unwrap import innermost_model
from .kwargs.activation_checkpointing import ActivationCheckpointingKwargs
from .kwargs.base import Handlers, KwargsHandler
from .kwargs.ddp import DistributedDataParallelKwargs
from .kwargs.fp8 import AORecipeKwargs, FP8Kwargs, MSAMPRecipeKwargs, TERecipeKwargs
from .kwargs.handlers import (
    AutocastKwargs,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProfileKwargs,
    TrackingKwargs,
)
from .precision.full import Precision
from .precision.scaler import SharedGradScaler
from .preemption.handler import PreemptionHandler, SaveOnSignal, resolve
from .setup import config_resolution
from .setup.prepare import Preparation
from .setup.rank_settings import compare_settings
from .setup.registry import StrategyName
from .setup.unprepared import StartupChecks
from .training import lomo, monitoring
from .training import moving_average as averages
from .training.gather_for_metrics import gather_for_metrics
from .training.gradient_accumulation import Accumulation, ItemReduction, accumulation_settings
from .training.muon import refuse_alone
from .training.uneven_inputs import join_uneven_inputs

if TYPE_CHECKING:  # the modules of plugins are loaded when they are used
    from typing_extensions import Never, TypeVarTuple, Unpack

    from .core.megatron import MegatronSettings
    from .deepspeed.plugin import DeepSpeedPlugin
    from .fsdp.plugin import FullyShardedDataParallelPlugin
    from .parallel.config import ParallelismConfig, TorchTensorParallelPlugin

    Ts = TypeVarTuple("Ts")

TrackerChoice = LoggerName | LoggerType | GeneralTracker | type[GeneralTracker]
T = TypeVar("T")
P = ParamSpec("P")
Model = TypeVar("Model", bound=nn.Module)
Loader = TypeVar("Loader", bound=PreparedLoader)

logger: Final = get_logger(__name__)


def _handler(kind: type[KwargsHandler]) -> Any:
    """Return an attribute that is the handler of a kind given in ``kwargs_handlers``."""
    doc = f"The {kind.__name__} given in ``kwargs_handlers``, or None."
    return property(lambda self: next(iter(self.handlers.all(kind)), None), doc=doc)


class Accelerator:
    """Runs a PyTorch training loop on the hardware that it was started on.

    Args:
        device_placement: move prepared models and batches to the device.
        split_batches: older form of ``DataLoaderConfiguration(split_batches=...)``.
        mixed_precision: "no", "fp16", "bf16" or "fp8". By default the launcher's choice, or "no" without one.
        gradient_accumulation_steps: micro batches per optimizer step. A number set by the launcher overrides it.
        cpu: use the CPU even if there is an accelerator.
        dataloader_config: how loaders are sharded.
        deepspeed_plugin: settings of DeepSpeed.
        fsdp_plugin: settings of fully sharded data parallelism.
        torch_tp_plugin: settings of tensor parallelism.
        megatron_lm_plugin: settings of Megatron-LM.
        rng_types: generators that loaders synchronise over the ranks at each epoch; by default the sampler's own
            ("generator").
        log_with: experiment trackers: a name (LoggerType), a class or an object, "all" for all installed ones, or a
            list of those.
        project_dir: the directory of everything that is saved.
        project_config: directories and checkpoint naming.
        gradient_accumulation_plugin: all settings of gradient accumulation.
        step_scheduler_with_optimizer: advance prepared schedulers when their optimizer steps, by as many steps as there
            are processes (one, with ``split_batches``). Turn it off if the loop steps the scheduler at other times, for
            example once per epoch.
        kwargs_handlers: AutocastKwargs, DistributedDataParallelKwargs, GradScalerKwargs, InitProcessGroupKwargs,
            ProfileKwargs, TrackingKwargs.
        dynamo_backend: back end of torch.compile.
        dynamo_plugin: all settings of torch.compile.
        deepspeed_plugins: several settings of DeepSpeed, by name.
        parallelism_config: sizes of the mesh axes.
        save_on_signal: save and exit when a signal arrives: True for SIGTERM and SIGUSR1, other signals, or
            SaveOnSignal. See :meth:`resume`.
        strategy: how models are wrapped, synchronised and saved: a Strategy object, the name of a registered one, or
            its plugin. By default it follows from the other plugins and the launcher.
        deterministic_reduction: add up the gradients of elastic loaders (``DataLoaderConfiguration(elastic=True)``) in
            an order that depends on the number of logical shards only, so that weights have the same bits on any number
            of processes. It computes with one thread per process on the CPU.
        monitor: measure what the time of each step is spent on, and report it to ``<project_dir>/monitor``; needs the
            extra ``accel[monitor]``. By default the launcher's choice (``accel launch --monitor``).
        **unknown: refused, with the argument of the closest name.

    Raises:
        ConfigurationError: an argument that is unknown, contradicts another, or cannot be used on this machine.

    Examples:
        >>> accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        >>> model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        >>> for inputs, targets in loader:
        ...     with accelerator.accumulate(model):
        ...         accelerator.backward(cross_entropy(model(inputs), targets))
        ...         optimizer.step()
        ...         optimizer.zero_grad()
        >>> accelerator.sync_gradients
        True
    """

    follows_reference: ClassVar[bool] = False
    """Whether ``load_state`` leaves it to the script to move the loaders, and ``gather`` and ``reduce`` cover all
    processes of a mesh, as scripts written for Accelerate expect. The class of accel-compat sets it."""

    def __init__(
        self,
        device_placement: bool = True,
        split_batches: bool = config_resolution.UNSET,
        mixed_precision: PrecisionType | Literal["no", "fp16", "bf16", "fp8"] | None = None,
        gradient_accumulation_steps: int = 1,
        cpu: bool = False,
        dataloader_config: DataLoaderConfiguration | None = None,
        deepspeed_plugin: DeepSpeedPlugin | Mapping[str, DeepSpeedPlugin] | None = None,
        fsdp_plugin: FullyShardedDataParallelPlugin | None = None,
        torch_tp_plugin: TorchTensorParallelPlugin | None = None,
        megatron_lm_plugin: MegatronSettings | None = None,
        rng_types: Sequence[RNGName | RNGType] | None = None,
        log_with: TrackerChoice | Sequence[TrackerChoice] | None = None,
        project_dir: str | os.PathLike[str] | None = None,
        project_config: ProjectConfiguration | None = None,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        step_scheduler_with_optimizer: bool = True,
        kwargs_handlers: Sequence[KwargsHandler] | None = None,
        dynamo_backend: DynamoBackend | str | None = None,
        dynamo_plugin: TorchDynamoPlugin | None = None,
        deepspeed_plugins: Mapping[str, DeepSpeedPlugin] | None = None,
        parallelism_config: ParallelismConfig | None = None,
        save_on_signal: SaveOnSignal | bool | str | Sequence[str] | None = None,
        strategy: Strategy | StrategyName | Plugin | None = None,
        deterministic_reduction: bool = False,
        monitor: bool | None = None,
        **unknown: Never,
    ) -> None:
        if unknown:
            config_resolution.refuse_unknown(unknown, Accelerator)
        check_flag("device_placement", device_placement)
        check_flag("step_scheduler_with_optimizer", step_scheduler_with_optimizer)
        check_flag("cpu", cpu, or_none=True)
        check_flag("deterministic_reduction", deterministic_reduction)
        check_flag("monitor", monitor, or_none=True)
        project = project_settings(project_dir, project_config)
        loaders = config_resolution.loader_settings(dataloader_config, split_batches)
        self.dataloader_config: DataLoaderConfiguration = loaders
        self.device_placement = device_placement
        self.step_scheduler_with_optimizer = step_scheduler_with_optimizer
        self.rng_types: list[str] = config_resolution.rng_settings(rng_types)
        self.handlers: Handlers = Handlers(kwargs_handlers)
        tracking = self.handlers.all(TrackingKwargs)
        delivery = tracking[0].to_delivery() if tracking else None
        self._tracking = TrackerRun(log_with, project.logging_dir, delivery=delivery, owner=self)
        launched = CoreOptions.from_environment()
        accumulation = accumulation_settings(
            gradient_accumulation_steps, gradient_accumulation_plugin, launched.gradient_accumulation_steps
        )
        dynamo = dynamo_settings(dynamo_backend, dynamo_plugin)
        self.state: AcceleratorState
        self.strategy: Strategy
        self.precision: Precision
        self.state, self.strategy, self.precision = config_resolution.build(
            self.handlers,
            owner=self,
            strategy=strategy,
            launched=launched,
            mixed_precision=mixed_precision,
            cpu=cpu,
            dynamo=dynamo,
            plugins={
                "deepspeed": deepspeed_plugin if deepspeed_plugin is not None else deepspeed_plugins,
                "fsdp": fsdp_plugin,
                "torch_tp": torch_tp_plugin,
                "megatron": megatron_lm_plugin,
                "mesh": parallelism_config,
            },
        )
        accumulation = self.strategy.accumulation(accumulation)
        self.process_state: PartialState = self.strategy.state
        if self.process_state.num_processes > 1:
            compare_settings(
                self.process_state,
                {
                    "mixed_precision": self.mixed_precision,
                    "gradient_accumulation_steps": accumulation.num_steps,
                    "strategy": type(self.strategy).__name__,
                },
            )
        self.gradient_state: GradientState = GradientState(accumulation)
        self.scaler: torch.amp.GradScaler | None = self.precision.scaler
        self.prepared: Preparation = Preparation(
            self.strategy,
            self.precision,
            next(iter(self.handlers.all(ActivationCheckpointingKwargs)), None),
            dynamo if dynamo.compiles else None,
            accumulation,
            loaders,
            device_placement,
            step_scheduler_with_optimizer,
            self.rng_types,
        )
        self._accumulation = Accumulation(
            self.process_state,
            self.gradient_state,
            accumulation,
            self.strategy,
            self.prepared.models,
            self.prepared.optimizers,
        )
        self.prepared.accumulation = self._accumulation
        replicas = self.strategy.replicas
        if loaders.elastic or deterministic_reduction or replicas is not None:
            self._accumulation.follow_elastic_loaders(loaders, deterministic_reduction)
            self.prepared.elastic_steps = self._accumulation.elastic
        if replicas is not None:
            self._tracking = replicas.share_tracking(self._tracking)
        self._checkpointer = Checkpointer(
            self.prepared, self._accumulation, self._tracking, project, self.follows_reference
        )
        self.preemption: PreemptionHandler | None = None
        if save_on_signal is not None and save_on_signal is not False:
            self.preemption = PreemptionHandler(resolve(save_on_signal), self)
        self.flag_tensor: torch.Tensor | None = None
        """The flag of :meth:`set_trigger` on this rank; None while it is not set."""
        self.startup_checks = None if self.strategy.uses_engine else StartupChecks(self.prepared)
        """Look for mistakes of training loops in the first backward passes; set it to None to run without them."""
        if replicas is not None:
            replicas.follow(self)
        by_launcher = launched.monitor or launched.monitor_port is not None
        measured = by_launcher if monitor is None else monitor
        self._monitor = monitoring.start(self, monitor, by_launcher) if measured else None

    def __getstate__(self) -> dict[str, Any]:
        # Signal handlers and measurements belong to this process; a monitor replaces some methods.
        own = {"preemption": None, "startup_checks": None, "_monitor": None}
        replaced = () if self._monitor is None else self._monitor.replaced
        return {name: value for name, value in {**self.__dict__, **own}.items() if name not in replaced}

    # -- preparing ---------------------------------------------------------------------------------------------------

    @overload
    def prepare(self, obj: T, /, *, device_placement: list[bool] | None = None) -> T: ...
    @overload
    def prepare(self, *args: Unpack[Ts], device_placement: list[bool] | None = None) -> tuple[Unpack[Ts]]: ...
    def prepare(  # type: ignore[misc]  # mypy does not see that Any accepts what Unpack[Ts] does
        self, *args: Any, device_placement: list[bool] | None = None
    ) -> Any:
        """Prepare models, optimizers, schedulers and loaders, given in any order.

        Args:
            *args: the objects; None and those of other types are returned as they are.
            device_placement: for each of them, whether it is moved to the device; by default the Accelerator's setting.

        Returns:
            The prepared object, or a tuple of them in the order given. To a type checker each keeps its type. What a
            prepared loader or optimizer has beyond that, such as ``loader.set_epoch``, is in the types that
            :meth:`prepare_data_loader` and :meth:`prepare_optimizer` return.

        Raises:
            ConfigurationError: an object is a number or a text, ``device_placement`` and ``args`` differ in length, or
                a model cannot be trained here.

        Examples:
            >>> accelerator = Accelerator(cpu=True)
            >>> model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
            >>> type(loader).__name__, type(optimizer).__name__
            ('DataLoaderShard', 'AcceleratedOptimizer')
        """
        if device_placement is not None and not isinstance(device_placement, (list, tuple)):
            raise ConfigurationError(f"device_placement={device_placement!r} must be a list of True, False or None.")
        placements: list[bool | None] = [None] * len(args) if device_placement is None else list(device_placement)
        for index, placement in enumerate(device_placement or ()):
            check_flag(f"device_placement[{index}]", placement, or_none=True)
        if len(placements) != len(args):
            raise ConfigurationError(
                f"device_placement has {len(placements)} values for {len(args)} objects. Give one for each."
            )
        result = self.prepared.prepare(args, placements, self)
        if self._monitor is not None:
            self._monitor.prepared()
        return result[0] if len(result) == 1 else tuple(result)

    def prepare_model(self, model: Model, device_placement: bool | None = None, evaluation_mode: bool = False) -> Model:
        """Prepare a model.

        Args:
            model: the model.
            device_placement: move it to the device; by default the Accelerator's setting.
            evaluation_mode: it will not be trained, so gradients need no synchronisation.

        Returns:
            The model, ready for training: in mixed precision, on its device, and wrapped or sharded as the strategy
            needs it.

        Raises:
            ConfigurationError: not a module; a model that is on several devices, in a run of several processes; or one
                that the strategy or the compiler does not support.

        Examples:
            >>> accelerator = Accelerator(cpu=True)
            >>> model = accelerator.prepare_model(model, evaluation_mode=True)
        """
        if device_placement is not None:
            check_flag("device_placement", device_placement)
        if evaluation_mode is not False:
            check_flag("evaluation_mode", evaluation_mode)
        prepared: Any = self.prepared.model(model, device_placement, evaluation_mode)
        return prepared

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> AcceleratedOptimizer:
        """Prepare an optimizer.

        Args:
            optimizer: the optimizer, of parameters of prepared models.
            device_placement: move its state to the device; by default the Accelerator's setting.

        Returns:
            The optimizer, whose ``step`` does nothing while gradients accumulate, and skips steps whose gradients
            overflowed.

        Raises:
            ConfigurationError: not an optimizer.

        Examples:
            >>> accelerator = Accelerator(cpu=True)
            >>> model = accelerator.prepare_model(model)
            >>> optimizer = accelerator.prepare_optimizer(optimizer)
            >>> optimizer.step_was_skipped
            False
        """
        if device_placement is not None:
            check_flag("device_placement", device_placement)
        return self.prepared.optimizer(optimizer, device_placement)

    def prepare_scheduler(self, scheduler: Any) -> AcceleratedScheduler:
        """Prepare a learning rate scheduler, after its optimizer.

        Args:
            scheduler: the scheduler of an optimizer that is prepared already.

        Returns:
            The scheduler, which advances when its optimizer steps.

        Raises:
            ConfigurationError: an object without a ``step`` method.

        Examples:
            >>> accelerator = Accelerator(cpu=True)
            >>> model, optimizer = accelerator.prepare(model, optimizer)
            >>> scheduler = torch.optim.lr_scheduler.StepLR(optimizer.optimizer, step_size=1)
            >>> scheduler = accelerator.prepare_scheduler(scheduler)
            >>> scheduler.get_last_lr()
            [0.1]
        """
        return self.prepared.scheduler(scheduler)

    def prepare_data_loader(
        self,
        data_loader: DataLoader[T],
        device_placement: bool | None = None,
        slice_fn_for_dispatch: Callable[..., Any] | None = None,
    ) -> PreparedLoader[T]:
        """Prepare a loader: each process gets its share of the data.

        Args:
            data_loader: the loader.
            device_placement: move batches to the device; by default the Accelerator's setting.
            slice_fn_for_dispatch: splits a batch that one process reads for all;
                ``accel_state.operations.slice_tensors`` by default.

        Returns:
            A loader whose batches are those of this process; its length is the number of batches of this process.

        Raises:
            ConfigurationError: not a loader, or one that contradicts ``DataLoaderConfiguration``.
            MissingDependencyError: ``use_stateful_dataloader`` without torchdata.

        Examples:
            >>> accelerator = Accelerator(cpu=True)
            >>> inputs, targets = next(iter(accelerator.prepare_data_loader(loader)))
            >>> inputs.device
            device(type='cpu')
        """
        if device_placement is not None:
            check_flag("device_placement", device_placement)
        if slice_fn_for_dispatch is not None and not callable(slice_fn_for_dispatch):
            raise ConfigurationError(f"slice_fn_for_dispatch={slice_fn_for_dispatch!r} must be a function or None.")
        prepared: PreparedLoader[T] = self.prepared.data_loader(data_loader, device_placement, slice_fn_for_dispatch)
        return prepared

    @overload
    def skip_first_batches(self, dataloader: Loader, num_batches: int = 0) -> Loader: ...
    @overload
    def skip_first_batches(self, dataloader: DataLoader[T], num_batches: int = 0) -> DataLoader[T]: ...
    def skip_first_batches(self, dataloader: DataLoader[Any], num_batches: int = 0) -> DataLoader[Any]:
        """Return a loader whose first epoch starts ``num_batches`` later.

        Skipped samples of map-style data are not read.

        Args:
            dataloader: a prepared loader, or another one of torch.
            num_batches: batches of this process, counted from the start of the epoch.

        Returns:
            A loader with the same settings and data.

        Raises:
            ConfigurationError: ``num_batches`` is negative or not an integer, or ``dataloader`` is not a loader.

        Examples:
            >>> accelerator = Accelerator(cpu=True)
            >>> loader = accelerator.prepare(loader)
            >>> len(list(accelerator.skip_first_batches(loader, num_batches=1)))
            1
        """
        return skip_first_batches(dataloader, num_batches=num_batches)

    def deepspeed_ulysses_dl_adapter(self, dl: Any, model: nn.Module) -> Any:
        """Return the loader for DeepSpeed's sequence parallelism (Ulysses); the given one if sequences are not sharded.

        Args:
            dl: a prepared loader.
            model: the prepared model.
        """
        return self.strategy.split_loader(dl, model)

    @overload
    def unwrap_model(
        self,
        model: DistributedDataParallel | DataParallel[Any],
        keep_fp32_wrapper: bool = True,
        keep_torch_compile: bool = True,
    ) -> Any: ...
    @overload
    def unwrap_model(self, model: Model, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True) -> Model: ...
    def unwrap_model(self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True) -> Any:
        """Return the model that was prepared, without its wrappers.

        Args:
            model: a prepared model.
            keep_fp32_wrapper: keep mixed precision's autocast around its forward.
            keep_torch_compile: keep it compiled.

        Returns:
            The model, which shares its parameters with the prepared one.

        Raises:
            ConfigurationError: not a module.

        Examples:
            >>> accelerator = Accelerator(cpu=True)
            >>> prepared = accelerator.prepare(model)
            >>> accelerator.unwrap_model(prepared) is model
            True
        """
        check_flag("keep_fp32_wrapper", keep_fp32_wrapper)
        check_flag("keep_torch_compile", keep_torch_compile)
        # An object that forwards attributes to a model (accmt) is returned as it is.
        if not isinstance(getattr(model, "_modules", None), dict):
            check_type(model, nn.Module, "unwrap_model", "Pass a model that prepare() returned.")
        return self.strategy.unwrap(model, keep_fp32_wrapper, keep_torch_compile)

    def verify_device_map(self, model: nn.Module) -> bool:
        """Return True if a model was dispatched over several devices by a device map."""
        check_type(model, nn.Module, "verify_device_map", "Pass a model.")
        return any(len(getattr(module, "hf_device_map", {})) > 1 for module in model.modules())

    # -- training ----------------------------------------------------------------------------------------------------

    def accumulate(self, *models: nn.Module, loader: Any = None) -> AbstractContextManager[None]:
        """Return a block of one micro batch. Gradients are synchronised and applied if it ends an accumulation window.

        Args:
            *models: the models whose gradients accumulate; all prepared ones by default.
            loader: the prepared loader whose end ends the window. By default the first that yielded a batch for this
                step; needed if a step takes batches of several loaders that do not end together.

        Returns:
            The context; in it ``sync_gradients`` says whether the window ends.

        Raises:
            ConfigurationError: one of the models is not a module, or ``loader`` was not prepared.

        Examples:
            >>> accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
            >>> model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
            >>> for inputs, targets in loader:
            ...     with accelerator.accumulate(model):
            ...         accelerator.backward(cross_entropy(model(inputs), targets))
            ...         optimizer.step()
            ...         optimizer.zero_grad()
            ...         print(accelerator.sync_gradients)
            False
            True
        """
        return self._accumulation.step(models, loader)

    def backward(
        self,
        loss: torch.Tensor,
        *,
        num_items: int | torch.Tensor | None = None,
        reduction: ItemReduction = "mean",
        **kwargs: Any,
    ) -> None:
        """Compute gradients, with the loss scaled for accumulation and for fp16.

        Args:
            loss: the loss of this micro batch on this rank, of shape ().
            num_items: number of items (tokens, pixels, ...) in the loss. With it, gradients are those of the mean over
                all items of the accumulation window on all ranks, however unevenly they are distributed. Without it,
                every micro batch has the same weight.
            reduction: whether ``loss`` is the "mean" or the "sum" of the ``num_items`` items; use "sum" if a micro
                batch may have none.
            **kwargs: for ``torch.Tensor.backward``; or ``learning_rate``, for optimizers that update in the backward
                pass; or ``scale_wrt_gas=False`` for a loss that is divided by the accumulation steps already, in a loop
                that sets ``gradient_state.sync_gradients`` itself.

        Raises:
            ConfigurationError: only some losses of a window have ``num_items``, or it is not a number of items.

        Examples:
            >>> accelerator = Accelerator(cpu=True)
            >>> model = accelerator.prepare(model)
            >>> logits, labels = model(torch.ones(3, 10)), torch.tensor([0, 1, -100])
            >>> loss = cross_entropy(logits, labels)  # the mean over two labels
            >>> accelerator.backward(loss, num_items=(labels != -100).sum())
        """
        if not hasattr(loss, "backward"):  # engines and pipelines have losses of their own
            check_type(loss, torch.Tensor, "backward", "Pass the tensor of the loss, such as outputs.loss.")
        if num_items is None and reduction != "mean":
            raise ConfigurationError(
                f"reduction={reduction!r} has no effect without num_items. Pass the number of items in the loss, too."
            )
        if self.prepared.applied:
            averages.refuse_applied(self.prepared.applied, "backward()")
        checks = self.startup_checks
        if checks is not None and not checks.next(loss, self._accumulation):
            self.startup_checks = None
        elastic, scaler = self._accumulation.elastic, self.scaler
        scale = None if scaler is None else scaler.scale
        if elastic is not None and elastic.backward(loss, num_items, reduction, scale, **kwargs):
            return
        gradient_state = self.gradient_state
        gradient_state.batch_used = True
        micro_batch = gradient_state.micro_batch
        if micro_batch is not None:
            self._accumulation.count_backward(micro_batch)
        # Transformers' Trainer divides the loss itself, and then sets sync_gradients itself, too.
        divided = not kwargs.pop("scale_wrt_gas", True)
        if num_items is not None:
            loss = self._accumulation.weigh_items(loss, num_items, reduction)
        elif not divided:
            loss = self._accumulation.weigh(loss)
        if "learning_rate" in kwargs:
            self.lomo_backward(loss, kwargs["learning_rate"])
            return
        if scale is not None:
            loss = scale(loss)
        self.strategy.backward(loss, divided or self._accumulation.current is not None, **kwargs)

    def _do_sync(self) -> None:
        """Count a micro batch and set ``sync_gradients``, for loops that call :meth:`no_sync` themselves."""
        self._accumulation.begin_step(tuple(self._models))

    def lomo_backward(self, loss: torch.Tensor, learning_rate: float) -> None:
        """Compute gradients and update weights in one pass, with the prepared Lomo or AdaLomo optimizers.

        Raises:
            ConfigurationError: there is no such prepared optimizer.
        """
        lomo.fused_backward(self.prepared.optimizers, loss, learning_rate)

    def maybe_context_parallel(
        self,
        buffers: list[torch.Tensor] | None = None,
        buffer_seq_dims: list[int] | None = None,
        no_restore_buffers: set[torch.Tensor] | None = None,
    ) -> AbstractContextManager[None]:
        """Return a block in which sequences are sharded over the context-parallel axis; without one they stay complete.

        Args:
            buffers: the tensors to split along their sequence dimension.
            buffer_seq_dims: that dimension of each of them.
            no_restore_buffers: those of them that need not be complete again after the block.
        """
        return self.strategy.split_sequences(buffers, buffer_seq_dims, no_restore_buffers)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return a block whose backward passes do not synchronise the model's gradients."""
        check_type(model, nn.Module, "no_sync", "Pass the model that prepare() returned.")
        return self.strategy.no_sync(model)

    def trigger_sync_in_backward(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return a block whose backward pass synchronises gradients although its forward ran under :meth:`no_sync`."""
        check_type(model, nn.Module, "trigger_sync_in_backward", "Pass the model that prepare() returned.")
        return self.strategy.sync_in_backward(model)

    def gathered_parameters(self, module: nn.Module) -> AbstractContextManager[None]:
        """Gather sharded parameters for the block, for terms of the loss that use them outside of ``forward``.

        Inside, ``module.weight`` and ``module.named_parameters()`` are whole tensors in the dtype that the parameters
        are stored in, and the gradients of what is computed with them reach the shards, averaged over the ranks as
        others are. Every rank must enter it. The model cannot be called inside. FSDP 1 and ZeRO stage 3 gather values
        only, in ``torch.no_grad()``. Where nothing is sharded, the block does nothing.

        Args:
            module: a prepared model, or a module in it, such as its output layer.

        Raises:
            ConfigurationError: not a module, the strategy cannot gather parameters, or one was changed in the block.

        Examples:
            >>> accelerator = Accelerator(cpu=True)
            >>> model = accelerator.prepare(model)
            >>> with accelerator.gathered_parameters(model):
            ...     penalty = sum(parameter.square().sum() for parameter in model.parameters())
        """
        check_type(module, nn.Module, "gathered_parameters", "Pass the model that prepare() returned, or its module.")
        return self.strategy.gathered_parameters(module)

    def moving_average(
        self,
        model: nn.Module,
        decay: float = 0.999,
        *,
        multi_avg_fn: averages.Average | None = None,
        use_buffers: bool = False,
    ) -> averages.MovingAverage:
        """Keep an exponential moving average (EMA) of a model's weights, or another average over the optimizer's steps.

        Where models are sharded, each rank averages its parts. ``save_state`` and ``load_state`` include the average,
        also on another number of processes: call this before ``load_state``. Averages of weights in 16 bits are in
        float32. Frozen weights take no memory until they are trained.

        Args:
            model: a prepared model.
            decay: the share of the former average in a new one: ``decay * average + (1 - decay) * weights``.
            multi_avg_fn: another average, such as ``torch.optim.swa_utils.get_swa_multi_avg_fn()``, which replaces
                ``decay``. It is called with lists of this rank's parts, so it must be elementwise.
            use_buffers: average buffers too, such as the statistics of batch normalisation; those of integers are
                copied. Otherwise the averages are evaluated with the model's own buffers.

        Returns:
            The average. Call ``update()`` after ``optimizer.step()``; ``applied()`` is a block in which the model has
            the averages; ``copy_to_model()`` leaves them in it, and ``reset()`` starts again from the current weights.

        Raises:
            ConfigurationError: the model is not prepared, ``decay`` is not a number from 0 to below 1, or averages have
                not been compared with one process under this strategy or precision.

        Examples:
            >>> accelerator = Accelerator(cpu=True)
            >>> model, optimizer = accelerator.prepare(model, optimizer)
            >>> ema = accelerator.moving_average(model, decay=0.99)
            >>> accelerator.backward(model(torch.ones(1, 10)).sum())
            >>> optimizer.step()
            >>> ema.update()
            True
            >>> with ema.applied():  # evaluate, or save the averages
            ...     accelerator.save_model(model, "averaged")
        """
        check_type(model, nn.Module, "moving_average", "Pass the model that prepare() returned.")
        check_flag("use_buffers", use_buffers)
        decay = check_number("decay", decay, at_least=0, below=1)
        return averages.start(model, self.prepared, self.fp8_backend, decay, multi_avg_fn, use_buffers)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Divide gradients by the loss scale, once per step; does nothing while they accumulate, or without a scale.

        Args:
            optimizer: a prepared optimizer, or several; all of them by default.
        """
        if optimizer is None:
            optimizer = self.prepared.optimizers
        chosen = optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]
        for item in chosen:
            check_type(item, torch.optim.Optimizer, "unscale_gradients", "Pass the optimizer that prepare() returned.")
        if self.scaler is None or not self.sync_gradients:
            return
        for item in chosen:
            self.scaler.unscale_(item.optimizer if isinstance(item, AcceleratedOptimizer) else item)

    def _optimizers_of(self, parameters: Iterable[torch.Tensor]) -> list[Any]:
        """Return the prepared optimizers of some parameters: others may still accumulate their gradients."""
        optimizers = self.prepared.optimizers
        if self.scaler is None or len(optimizers) == 1:
            return optimizers
        wanted = set(map(id, parameters))
        owns = [any(id(item) in wanted for group in one.param_groups for item in group["params"]) for one in optimizers]
        return list(itertools.compress(optimizers, owns)) or optimizers

    def clip_grad_norm_(
        self, parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2
    ) -> torch.Tensor:
        """Clip the norm of all gradients together.
        While gradients accumulate they are incomplete, so their norm is computed and they are not clipped.

        Args:
            parameters: the parameters whose gradients are clipped.
            max_norm: the largest allowed norm.
            norm_type: the p of the norm; ``inf`` for the largest element.

        Returns:
            The norm before clipping, unscaled, of shape (); equal on all ranks after synchronisation.

        Raises:
            ConfigurationError: ``max_norm`` is negative or NaN, or ``norm_type`` is not positive.

        Examples:
            >>> accelerator = Accelerator(cpu=True)
            >>> model, optimizer = accelerator.prepare(model, optimizer)
            >>> accelerator.backward(model(torch.ones(1, 10)).sum())
            >>> accelerator.clip_grad_norm_(model.parameters(), max_norm=1.0)
            tensor(4.6904)
        """
        chosen = self.strategy.current_parameters(_tensors(parameters, "clip_grad_norm_"))
        max_norm = check_number("max_norm", max_norm, at_least=0, infinite=True)
        norm_type = check_number("norm_type", norm_type, above=0, infinite=True)
        self.unscale_gradients(self._optimizers_of(chosen))
        limit = max_norm if self.sync_gradients else float("inf")
        return self.strategy.clip_grad_norm(chosen, limit, norm_type)

    def clip_grad_value_(self, parameters: torch.Tensor | Iterable[torch.Tensor], clip_value: float) -> None:
        """Clip every element of the gradients to ``[-clip_value, clip_value]``; does nothing while they accumulate.

        Args:
            parameters: the parameters whose gradients are clipped.
            clip_value: the largest allowed absolute value of an element.

        Raises:
            ConfigurationError: ``clip_value`` is negative or NaN, or ``parameters`` are not tensors.

        Examples:
            >>> accelerator = Accelerator(cpu=True)
            >>> model, optimizer = accelerator.prepare(model, optimizer)
            >>> accelerator.backward(model(torch.ones(1, 10)).sum())
            >>> accelerator.clip_grad_value_(model.parameters(), clip_value=0.5)
            >>> model.bias.grad
            tensor([0.5000, 0.5000])
        """
        chosen = self.strategy.current_parameters(_tensors(parameters, "clip_grad_value_"))
        clip_value = check_number("clip_value", clip_value, at_least=0, infinite=True)
        self.unscale_gradients(self._optimizers_of(chosen))
        if self.sync_gradients and chosen:
            self.strategy.clip_grad_value(chosen, clip_value)

    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> AbstractContextManager[None]:
        """Return a block that computes in mixed precision; the forward of prepared models needs none.

        Args:
            autocast_handler: settings for this block; by default those of the Accelerator.

        Returns:
            The context; outside of it dtypes are those of the tensors.

        Raises:
            ConfigurationError: ``autocast_handler`` is something else.

        Examples:
            >>> accelerator = Accelerator(cpu=True, mixed_precision="bf16")
            >>> with accelerator.autocast():
            ...     print(model(torch.ones(1, 10)).dtype)
            torch.bfloat16
        """
        if autocast_handler is not None:
            check_type(autocast_handler, AutocastKwargs, "autocast", "Pass AutocastKwargs(...), or nothing.")
        return self.precision.autocast(autocast_handler)

    def join_uneven_inputs(
        self, joinables: list[Any], even_batches: bool | None = None
    ) -> AbstractContextManager[None]:
        """Return a block whose loop may end earlier on some ranks than on others.

        Args:
            joinables: the prepared models (and other joinable objects) that train in the block.
            even_batches: overrides the loaders' ``even_batches`` within the block.

        Returns:
            The context; every rank leaves it when the last one has finished its loop.

        Raises:
            ConfigurationError: the precision needs all ranks at every step.

        Examples:
            >>> accelerator = Accelerator(cpu=True)
            >>> model, loader = accelerator.prepare(model, loader)
            >>> with accelerator.join_uneven_inputs([model], even_batches=False):
            ...     for inputs, targets in loader:
            ...         accelerator.backward(cross_entropy(model(inputs), targets))
        """
        check_type(joinables, (list, tuple), "join_uneven_inputs", "Pass a list of prepared models: [model].")
        check_flag("even_batches", even_batches, or_none=True)
        self.precision.check_uneven_inputs()
        if self.use_distributed:
            refuse_alone(self.prepared.optimizers, "join_uneven_inputs")
        return join_uneven_inputs(self.strategy, self.prepared.dataloaders, joinables, even_batches)

    @contextmanager
    def profile(self, profile_handler: ProfileKwargs | None = None) -> Iterator[torch.profiler.profile]:
        """Profile the block.

        Args:
            profile_handler: what to record; by default the ProfileKwargs of the Accelerator.

        Yields:
            The profiler; call its ``step()`` after each training step if a schedule is set.

        Raises:
            ConfigurationError: ``profile_handler`` is something else.

        Examples:
            >>> accelerator = Accelerator(cpu=True)
            >>> with accelerator.profile(ProfileKwargs(with_flops=True)) as profiler:
            ...     result = model(torch.ones(1, 10))
            >>> sum(event.flops for event in profiler.key_averages()) > 0
            True
        """
        settings = profile_handler or self.handlers.get(ProfileKwargs)
        check_type(settings, ProfileKwargs, "profile", "Pass ProfileKwargs(...), or nothing.")
        with settings.build() as profiler:
            yield profiler
        if settings.output_trace_dir is not None:
            directory = Path(settings.output_trace_dir)
            directory.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(directory / f"profile_{self.process_index}.json"))
            self.wait_for_everyone()

    # -- processes ---------------------------------------------------------------------------------------------------

    @property
    def use_distributed(self) -> bool:
        """True if there is more than one process."""
        return self.process_state.use_distributed

    @property
    def is_main_process(self) -> bool:
        """True if this is rank 0."""
        return self.process_state.is_main_process

    @property
    def is_local_main_process(self) -> bool:
        """True if this is local rank 0, the first process of its node."""
        return self.process_state.is_local_main_process

    @property
    def is_last_process(self) -> bool:
        """True if this is the highest rank."""
        return self.process_state.is_last_process

    @overload
    def on_main_process(self, function: Callable[P, T]) -> Callable[P, T | None]: ...
    @overload
    def on_main_process(self, function: None = None) -> RunsOnSome: ...
    def on_main_process(self, function: Callable[..., Any] | None = None) -> Any:
        """Run the decorated function on rank 0 only; elsewhere it returns None."""
        return self.process_state.on_main_process(function)

    @overload
    def on_local_main_process(self, function: Callable[P, T]) -> Callable[P, T | None]: ...
    @overload
    def on_local_main_process(self, function: None = None) -> RunsOnSome: ...
    def on_local_main_process(self, function: Callable[..., Any] | None = None) -> Any:
        """Run the decorated function on the first process of each node only; elsewhere it returns None."""
        return self.process_state.on_local_main_process(function)

    def on_last_process(self, function: Callable[P, T]) -> Callable[P, T | None]:
        """Run the decorated function on the highest rank only; elsewhere it returns None."""
        return self.process_state.on_last_process(function)

    @overload
    def on_process(self, function: Callable[P, T], process_index: int | None = None) -> Callable[P, T | None]: ...
    @overload
    def on_process(self, function: None = None, process_index: int | None = None) -> RunsOnSome: ...
    def on_process(self, function: Callable[..., Any] | None = None, process_index: int | None = None) -> Any:
        """Run the decorated function on one rank only; elsewhere it returns None.

        Args:
            function: the function to decorate; None to pass the rank first: ``@on_process(process_index=1)``.
            process_index: the rank that runs it, counted over all machines from 0.

        Returns:
            The function, or on other ranks one that does nothing and returns None.

        Raises:
            ValueError: there is no such rank.

        Examples:
            >>> accelerator = Accelerator(cpu=True)
            >>> @accelerator.on_process(process_index=0)
            ... def show():
            ...     print("rank 0")
            >>> show()
            rank 0
        """
        return self.process_state.on_process(function, process_index)

    @overload
    def on_local_process(
        self, function: Callable[P, T], local_process_index: int | None = None
    ) -> Callable[P, T | None]: ...
    @overload
    def on_local_process(self, function: None = None, local_process_index: int | None = None) -> RunsOnSome: ...
    def on_local_process(
        self, function: Callable[..., Any] | None = None, local_process_index: int | None = None
    ) -> Any:
        """Run the decorated function on one local rank of each node only; elsewhere it returns None."""
        return self.process_state.on_local_process(function, local_process_index)

    def main_process_first(self) -> AbstractContextManager[None]:
        """Run the block on rank 0 before all other ranks, for example to fill a cache that they read."""
        return self.process_state.main_process_first()

    def local_main_process_first(self) -> AbstractContextManager[None]:
        """Run the block on the first process of each node before the others."""
        return self.process_state.local_main_process_first()

    def split_between_processes(self, inputs: T, apply_padding: bool = False) -> AbstractContextManager[T]:
        """Give each process its share of the inputs.

        Args:
            inputs: a list, tuple, tensor, array or data set; or a dictionary or named tuple of those, of equal lengths.
            apply_padding: repeat the last input on processes with one input fewer, so that results can be gathered;
                the caller removes the duplicates.

        Yields:
            A contiguous share, in rank order. Without padding the shares are a partition of the inputs; the first ranks
            have one input more if the length is not a multiple of the world size.

        Raises:
            TypeError: the inputs cannot be split.
            ValueError: the members of a dictionary differ in length, or the inputs to pad are empty.

        Examples:
            >>> accelerator = Accelerator(cpu=True)
            >>> with accelerator.split_between_processes(["a dog", "a cat"]) as prompts:
            ...     print(prompts)
            ['a dog', 'a cat']
        """
        return self.process_state.split_between_processes(inputs, apply_padding)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Call `print` once per node (on the local main process)."""
        self.process_state.print(*args, **kwargs)

    # -- communicating -----------------------------------------------------------------------------------------------

    def gather(self, tensor: T) -> T:
        """Concatenate nested tensors of all ranks along the first dimension; see :func:`accel.utils.gather`.
        On a mesh (ParallelismConfig) the ranks are those that get different samples; all of them for scripts that
        import ``Accelerator`` from ``accelerate`` (accel-compat), which divide by the sizes of the axes themselves.

        Args:
            tensor: nested data; every tensor has the same shape and dtype on all ranks.

        Returns:
            Data of the same structure on every rank: tensors of shape (n, ...) become (ranks * n, ...), in rank order,
            and those of shape () become (ranks,). A single process gets the data unchanged.

        Raises:
            TypeError: the data has leaves other than tensors.
            DistributedOperationException: the ranks pass different shapes or dtypes.

        Examples:
            >>> accelerator = Accelerator(cpu=True)
            >>> accelerator.gather({"loss": torch.tensor([0.5])})  # one value per process
            {'loss': tensor([0.5000])}
        """
        strategy = self.strategy
        collectives = self.process_state.collectives if self.follows_reference else strategy.data_collectives
        return operations.gather(tensor, collectives=collectives)

    @overload
    def gather_for_metrics(
        self, input_data: T, use_gather_object: Literal[False] = False, *, loader: Any = None
    ) -> T: ...
    @overload
    def gather_for_metrics(self, input_data: Any, use_gather_object: bool, *, loader: Any = None) -> Any: ...
    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False, *, loader: Any = None) -> Any:
        """Gather predictions and labels of the current batch, without the padding of the last batch.

        Args:
            input_data: nested tensors of shape (samples, ...); or a list of objects, one per sample.
            use_gather_object: treat the data as objects even if it consists of tensors.
            loader: the prepared loader that the data comes from, while several are being iterated. By default the one
                whose batch contains a tensor of the data (such as the labels), or else the first that yielded a batch
                for this step, with a warning if that makes a difference.

        Returns:
            Over the loop, exactly the samples of the data set, in its order, on every rank.

        Raises:
            DistributedOperationException: the ranks pass different structures, shapes or dtypes.
            ConfigurationError: the data has tensors of the batches of several loaders with different padding, or
                ``loader`` was not prepared or is not being iterated.

        Examples:
            >>> accelerator = Accelerator(cpu=True)
            >>> model, loader = accelerator.prepare(model, loader)
            >>> total = 0
            >>> for inputs, targets in loader:
            ...     predictions, targets = accelerator.gather_for_metrics((model(inputs).argmax(1), targets))
            ...     total += len(targets)
            >>> total  # without the samples that even batches repeat
            8
        """
        check_flag("use_gather_object", use_gather_object)
        shares = self.strategy.averaging_collectives if self.follows_reference else None
        return gather_for_metrics(
            input_data,
            self.process_state,
            self.gradient_state,
            use_gather_object,
            self.strategy.data_collectives,
            shares,
            loader,
        )

    def reduce(self, tensor: T, reduction: Reduction = "sum", scale: float = 1.0) -> T:
        """Reduce nested tensors of all ranks element by element; see :func:`accel.utils.reduce`.
        On a mesh (ParallelismConfig) the ranks are those that get different samples or different parts of them; all of
        them with the ``Accelerator`` of accel-compat, as with :meth:`gather`.

        Args:
            tensor: nested data; every tensor has the same shape and dtype on all ranks.
            reduction: "sum", "mean", "max", "min", or "none" to keep each rank's values.
            scale: factor of the result.

        Returns:
            Data of the same structure and shapes, equal on every rank. A mean of integers is float32, a sum int64.
            Means and sums can be backpropagated through, on every rank alike, with the gradients of one process.

        Raises:
            ConfigurationError: an unknown reduction, or a ``scale`` that is not a finite number.
            TypeError: the data has leaves other than dense tensors.
            DistributedOperationException: the ranks pass different shapes or dtypes.

        Examples:
            >>> accelerator = Accelerator(cpu=True)
            >>> accelerator.reduce(torch.tensor(2.0), reduction="mean")
            tensor(2.)
        """
        strategy = self.strategy
        collectives = self.process_state.collectives if self.follows_reference else strategy.averaging_collectives
        return operations.reduce(tensor, reduction, scale, collectives=collectives)

    def pad_across_processes(self, tensor: T, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> T:
        """Pad nested tensors to the longest of all ranks; see :func:`accel.utils.pad_across_processes`.

        Args:
            tensor: nested data; tensors may differ between ranks in the length of ``dim`` only.
            dim: the dimension to pad; tensors without it are returned unchanged.
            pad_index: the value to pad with.
            pad_first: pad at the beginning instead of the end.

        Returns:
            Data of the same structure, whose tensors have the same length in ``dim`` on all ranks.

        Raises:
            DistributedOperationException: the ranks pass other structures or numbers of dimensions.
            ConfigurationError: a tensor that some rank has to pad cannot have the value ``pad_index``.

        Examples:
            >>> accelerator = Accelerator(cpu=True)
            >>> tokens = accelerator.pad_across_processes(torch.ones(2, 3), dim=1, pad_index=0)
            >>> accelerator.gather(tokens).shape  # ranks may have had other lengths
            torch.Size([2, 3])
        """
        return operations.pad_across_processes(tensor, dim=dim, pad_index=pad_index, pad_first=pad_first)

    def wait_for_everyone(self) -> None:
        """Return when every process has called it; at once in a single process."""
        self.process_state.wait_for_everyone()

    def set_trigger(self) -> None:
        """Set a flag on this rank, which all ranks see at their next :meth:`check_trigger`."""
        self.flag_tensor = torch.tensor(1, device=self.device)

    def check_trigger(self) -> bool:
        """Return True if any rank set the flag since the last check, and reset it. Every rank must call it."""
        flag = torch.tensor(0, device=self.device) if self.flag_tensor is None else self.flag_tensor
        raised = bool(self.process_state.collectives.all_reduce(flag, "max").item())
        self.flag_tensor = None
        return raised

    set_breakpoint = set_trigger
    check_breakpoint = check_trigger

    # -- saving and loading ------------------------------------------------------------------------------------------

    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        safe_serialization: bool = True,
        *,
        blocking: bool = True,
        **save_model_func_kwargs: Any,
    ) -> Location:
        """Save everything that training needs to continue exactly where it is. Every rank must call it.
        This includes models, optimizers, schedulers, positions of the loaders, the loss scale, the random number
        generators of every rank, the registered objects, and the gradients of open accumulation windows. The checkpoint
        gets its name when it is complete and on the disk; if saving fails, an older one of that name is unchanged. With
        automatic naming, old ones are then deleted, down to ``total_limit``.

        Args:
            output_dir: the directory of this checkpoint, which replaces an older one; without effect with automatic
                naming.
            safe_serialization: weights in the safetensors format rather than torch's.
            blocking: return when the checkpoint is complete. With False, return when the state has been copied into
                host memory (kept for the next time: one more copy of the state), and write it in the background. One
                save runs at a time: the next one waits for it, as do :meth:`load_state`, :meth:`wait_for_save`,
                :meth:`end_training` and the exit of the process. The first of these raises its error.
            **save_model_func_kwargs: for strategies that take arguments; none does at present, and they are ignored
                with a warning.

        Returns:
            The path of the checkpoint.

        Raises:
            CheckpointError: saving failed on some rank; or the last save in the background did.
            ConfigurationError: no directory, or one that cannot be used; with automatic naming, a checkpoint of this
                number exists.

        Examples:
            >>> accelerator = Accelerator(cpu=True, project_dir="run")
            >>> model, optimizer = accelerator.prepare(model, optimizer)
            >>> accelerator.save_state("run/last").name
            'last'
        """
        for name, flag in (("safe_serialization", safe_serialization), ("blocking", blocking)):
            if not isinstance(flag, bool):
                check_flag(name, flag)
        if save_model_func_kwargs:
            names = ", ".join(save_model_func_kwargs)
            logger.warning_once(f"save_state got {names}, which has no effect with {type(self.strategy).__name__}.")
        if self.process_state.stands_by:
            return self._checkpointer.count_save(output_dir)
        with ExitStack() as stack:
            if self._monitor is not None:
                stack.enter_context(self._monitor.part("saving"))
            if self.prepared.applied:
                stack.enter_context(averages.suspended(self.prepared.applied))
            return self._checkpointer.save_state(output_dir, safe_serialization, blocking)

    def wait_for_save(self) -> None:
        """Return when the save started with ``blocking=False`` has ended; at once without one. Every rank must call it.

        Raises:
            CheckpointError: it failed on some rank.

        Examples:
            >>> accelerator = Accelerator(cpu=True)
            >>> model, optimizer = accelerator.prepare(model, optimizer)
            >>> path = accelerator.save_state("background", blocking=False)
            >>> accelerator.wait_for_save()
            >>> accelerator.save_in_flight
            False
        """
        self._checkpointer.wait_for_save()

    def wait_for_uploads(self) -> None:
        """Return when all checkpoints are in the store that ``ProjectConfiguration(upload_to=...)`` names.

        Every rank must call it. :meth:`end_training` and the interpreter's exit wait too.

        Raises:
            CheckpointError: the last upload failed; the checkpoint is complete in the project directory.
        """
        self.wait_for_save()
        self._checkpointer.wait_for_uploads()

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: dict[str, Any] | None = None,
        *,
        strict: bool | None = None,
        **load_model_func_kwargs: Any,
    ) -> None:
        """Load a state of :meth:`save_state` into the objects that are prepared and registered, in their order.
        A script may prepare fewer objects than were saved, such as the model alone for an evaluation: the rest is left,
        with a warning. Unless all optimizers are prepared, loaders begin at their start.

        If the state was saved in the last step of an epoch, before its loop ended, the loader begins with the next
        epoch, as scripts expect that compute the epoch from the number of steps. :meth:`resume` completes the epoch.

        Training continues exactly as it would have: a loader in the middle of an epoch returns the rest of it in its
        next iteration, and later epochs in full. Files are verified first, and reading them runs no code. Every rank
        must call it.

        Args:
            input_dir: the checkpoint. "latest" is the newest complete one: of automatic naming, or else in the project
                directory. None is the same, with automatic naming.
            load_kwargs: for ``torch.load`` of everything but weights. ``weights_only=False`` allows code in the files
                to run.
            strict: True also refuses a checkpoint with other objects than are prepared and registered. False also loads
                those weights of a model that fit, where names differ. None, the default, does neither.
            **load_model_func_kwargs: for ``load_state_dict`` of the models; and ``map_location``, where tensors are
                read to: "cpu" (the default) or "on_device".

        Raises:
            CheckpointError: on every rank, if on one: files are missing or damaged, or there are more objects of some
                kind than were saved (with ``strict=True``, also fewer).
            ConfigurationError: there is no such directory, or no checkpoint in it.

        Examples:
            >>> accelerator = Accelerator(cpu=True)
            >>> model, optimizer = accelerator.prepare(model, optimizer)
            >>> path = accelerator.save_state("state")
            >>> accelerator.load_state("state")
        """
        if load_kwargs is not None:
            check_type(load_kwargs, Mapping, "load_state(load_kwargs=...)", "Pass arguments of torch.load by name.")
        if strict is not None:
            check_flag("strict", strict)
            load_model_func_kwargs["strict"] = strict
        if self.prepared.applied:
            averages.refuse_applied(self.prepared.applied, "load_state()")
        with nullcontext() if self._monitor is None else self._monitor.part("loading"):
            self._checkpointer.load_state(input_dir, load_kwargs, load_model_func_kwargs)
        if self._monitor is not None:
            self._monitor.loaded()

    def resume(self) -> bool:
        """Load the newest complete state, if there is one. Call it on every rank, when everything is prepared.

        States are looked for where :meth:`save_state` saves them with automatic naming, else in the project directory,
        or in that of :class:`SaveOnSignal`. The main process prints where the training continues, or that there is no
        state. Afterwards a loader's ``iteration`` is the epoch to continue with. If all of its batches were handed out,
        but its loop had not ended, the next iteration has none, so that the code after the loop runs.

        Returns:
            Whether there was one.

        Raises:
            CheckpointError: it is damaged, or does not fit what was prepared.
            ConfigurationError: there is no directory to look in, or :meth:`save_state` could not save in it.

        Examples:
            >>> configuration = ProjectConfiguration("project", automatic_checkpoint_naming=True)
            >>> accelerator = Accelerator(cpu=True, project_config=configuration)
            >>> model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
            >>> accelerator.resume()  # whether there was a checkpoint to continue from
            False
        """
        output_dir = None if self.preemption is None else self.preemption.settings.output_dir
        newest = None
        replicas = self.strategy.replicas
        if replicas is None or output_dir is not None or self.project_dir is not None:
            newest = self._checkpointer.newest(output_dir)
        if newest is not None:
            self.load_state(newest, strict=True)
            for loader in self.prepared.dataloaders:
                if isinstance(loader, PreparedLoader):
                    loader.pass_over_finished_epoch(False)
        joined = replicas is not None and replicas.join_run()
        if self.is_main_process and not joined:
            print(f"accel: {_resumption(newest, self.prepared.dataloaders)}", file=sys.stderr, flush=True)
        return joined or newest is not None

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Include objects in saved states.

        Args:
            *objects: objects with ``state_dict`` and ``load_state_dict``; they are loaded in the same order.

        Raises:
            ConfigurationError: one has no ``state_dict`` and ``load_state_dict``; none is registered then.

        Examples:
            >>> class Counter:
            ...     def __init__(self):
            ...         self.samples = 0
            ...
            ...     def state_dict(self):
            ...         return {"samples": self.samples}
            ...
            ...     def load_state_dict(self, state):
            ...         self.samples = state["samples"]
            >>> accelerator = Accelerator(cpu=True)
            >>> accelerator.register_for_checkpointing(Counter())
        """
        self._checkpointer.register(objects)

    def register_save_state_pre_hook(self, hook: SaveHook) -> RemovableHandle:
        """Call a function in each :meth:`save_state`, before anything is written.

        Args:
            hook: called on every rank as ``hook(models, weights, output_dir)`` with the prepared models, their state
                dicts, and the directory that is being written, which gets its final name later. It may write files
                there, which become part of the checkpoint, and remove from ``weights`` what it has saved itself.

        Returns:
            A handle; its ``remove()`` removes the hook.
        """
        return self._checkpointer.add_hook(self._checkpointer.save_hooks, hook)

    def register_load_state_pre_hook(self, hook: LoadHook) -> RemovableHandle:
        """Call a function in each :meth:`load_state`, when the files are verified and before anything is loaded.

        Args:
            hook: called on every rank as ``hook(models, input_dir)``. It may remove from ``models`` those that it has
                loaded itself.

        Returns:
            A handle; its ``remove()`` removes the hook.
        """
        return self._checkpointer.add_hook(self._checkpointer.load_hooks, hook)

    def save(self, obj: Any, f: Any, safe_serialization: bool = False) -> None:
        """Save an object once, on the main process; see :func:`accel.utils.save`."""
        weights_io.save(obj, f, self.project_configuration.save_on_each_node, safe_serialization)

    def load(self, f: Any, map_location: Any = None, **kwargs: Any) -> Any:
        """Load what :meth:`save` wrote, without running code from the file; see :func:`accel.utils.load`."""
        return weights_io.load(f, map_location, **kwargs)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True, *, trainable_only: bool = False) -> dict[str, Any]:
        """Return the weights of a prepared model, under the names of the model that was prepared.

        Args:
            model: a prepared model.
            unwrap: remove from the names what wrapping and compiling have added.
            trainable_only: only the parameters that require gradients, such as the adapters of a frozen model. FSDP 2
                and tensor parallelism gather no other parameter.

        Returns:
            Tensors by name, complete also where the model is sharded. In that case every rank must call it.

        Raises:
            ConfigurationError: not a module; or the strategy does not support ``trainable_only``.

        Examples:
            >>> accelerator = Accelerator(cpu=True)
            >>> model = accelerator.prepare(model)
            >>> list(accelerator.get_state_dict(model))  # complete, also if the model is sharded
            ['weight', 'bias']
        """
        check_type(model, nn.Module, "get_state_dict", "Pass a model that prepare() returned.")
        check_flag("unwrap", unwrap)
        check_flag("trainable_only", trainable_only)
        if trainable_only and not unwrap:
            raise ConfigurationError("trainable_only=True does not support unwrap=False. Leave one of them out.")
        strategy = self.strategy
        if unwrap:  # the user's own model, of what unwrap_model returned, may have parts of its weights only
            own = innermost_model(model)
            model = next((item for item in self.prepared.models if innermost_model(item) is own), model)
        state = strategy.trainable_state_dict(model) if trainable_only else strategy.state_dict(model, unwrap)
        if unwrap:
            quantized_layers.add_scales(model, state)
        return averages.own_memory(state, model) if self.prepared.applied else state

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Save a model's weights, which can be loaded without accel.

        Args:
            model: a prepared model.
            save_directory: the directory; it is made if needed.
            max_shard_size: largest file, in bytes or as text such as "5GB"; larger models are split, with an index.
            safe_serialization: the safetensors format rather than torch's.

        Raises:
            ConfigurationError: the directory is a file or a URL, ``max_shard_size`` is not a positive size, a weight
                has no values, or a model that is sharded over several nodes would be saved on each of them.

        Examples:
            >>> accelerator = Accelerator(cpu=True)
            >>> model = accelerator.prepare(model)
            >>> accelerator.save_model(model, "weights")
            >>> os.listdir("weights")
            ['model.safetensors']
        """
        weights_io.check_shard_size(max_shard_size)
        check_flag("safe_serialization", safe_serialization)
        self._checkpointer.check_model_directory(save_directory)
        state_dict = self.get_state_dict(model)
        self._checkpointer.save_model(model, state_dict, save_directory, max_shard_size, safe_serialization)

    # -- experiment trackers -----------------------------------------------------------------------------------------

    def init_trackers(self, project_name: str, config: Any = None, init_kwargs: TrackerSettings = None) -> None:
        """Start a run in every tracker.

        Args:
            project_name: name of the project or experiment.
            config: hyperparameters to save with the run: a dictionary, an argparse namespace, or a data class.
            init_kwargs: further arguments for a tracker's constructor, by the tracker's name.

        Raises:
            ConfigurationError: a config of another type.
            TrackerError: in strict mode (TrackingKwargs), a tracker failed to start.

        Examples:
            >>> accelerator = Accelerator(cpu=True, log_with="jsonl", project_dir="runs")
            >>> accelerator.init_trackers("digits", config={"lr": 0.1})
            >>> accelerator.log({"loss": 0.5}, step=0)
            >>> accelerator.end_training()
        """
        self._tracking.init_trackers(project_name, config, init_kwargs)

    def log(self, values: Mapping[str, Any], step: int | None = None, log_kwargs: TrackerSettings = None) -> None:
        """Log values to every tracker, as they are now; they are delivered in the background.

        Args:
            values: names to numbers, tensors (on any device), texts, or other values that the trackers take.
            step: the step they belong to.
            log_kwargs: further arguments for a tracker's ``log``, by the tracker's name.

        Raises:
            ConfigurationError: ``values`` is not a dictionary.
            TrackerError: in strict mode, a tracker failed since the last call.

        Examples:
            >>> accelerator = Accelerator(cpu=True, log_with="jsonl", project_dir="runs")
            >>> accelerator.init_trackers("digits")
            >>> accelerator.log({"loss": torch.tensor(0.5), "accuracy": 0.9}, step=0)
            >>> accelerator.end_training()
        """
        self._tracking.log(values, step, log_kwargs)

    def log_images(
        self, values: Mapping[str, Any], step: int | None = None, log_kwargs: TrackerSettings = None
    ) -> None:
        """Log images to every tracker that takes images; see :meth:`accel_track.TrackerRun.log_images`."""
        self._tracking.log_images(values, step, log_kwargs)

    def log_table(
        self,
        table_name: str,
        columns: list[str] | None = None,
        data: list[list[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        log_kwargs: TrackerSettings = None,
    ) -> None:
        """Log a table to every tracker that takes tables; see :meth:`accel_track.TrackerRun.log_table`."""
        self._tracking.log_table(table_name, columns, data, dataframe, step, log_kwargs)

    def log_artifact(
        self, local_path: str | os.PathLike[str], artifact_path: str | None = None, log_kwargs: TrackerSettings = None
    ) -> None:
        """Save a file in every tracker that takes files; see :meth:`accel_track.TrackerRun.log_artifact`."""
        self._tracking.log_artifact(local_path, artifact_path, log_kwargs)

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """Return a tracker by its name; on ranks where it does not run, an object whose methods do nothing.

        Args:
            name: the tracker's name.
            unwrap: return the object of the tracker's own library.

        Returns:
            The tracker, or with ``unwrap`` what its library calls a run.

        Raises:
            ConfigurationError: no tracker of that name was started.

        Examples:
            >>> accelerator = Accelerator(cpu=True, log_with="jsonl", project_dir="runs")
            >>> accelerator.init_trackers("digits")
            >>> accelerator.get_tracker("jsonl").name
            'jsonl'
            >>> accelerator.end_training()
        """
        return self._tracking.get_tracker(name, unwrap)

    # -- ending ------------------------------------------------------------------------------------------------------

    def free_memory(self, *objects: Any) -> list[Any]:
        """Drop every reference to prepared objects, and return unused memory to the device.

        Waits for a save in the background.

        Args:
            *objects: variables of the caller to drop as well.

        Returns:
            As many Nones: ``model, optimizer = accelerator.free_memory(model, optimizer)``.

        Raises:
            CheckpointError: a save started with ``blocking=False`` has failed.
        """
        self._forget()
        return release_memory(*objects)

    def _forget(self) -> None:
        if self.startup_checks is not None:
            self.startup_checks.stop()
        self.prepared.forget()
        self._accumulation.forget()
        self.strategy.forget()
        if isinstance(self.scaler, SharedGradScaler):
            self.scaler.forget()
        self._checkpointer.release()

    def clear(self, *objects: Any) -> list[Any]:
        """Do the same as :meth:`free_memory`."""
        return self.free_memory(*objects)

    def end_training(self) -> None:
        """Finish a save in the background and the trackers, and release the process group and the shared state.
        Call it at the end of the script, on every rank.

        Raises:
            CheckpointError: a save started with ``blocking=False`` has failed, or the upload of the last checkpoint.
            TrackerError: in strict mode (TrackingKwargs), a tracker has failed.

        Examples:
            >>> accelerator = Accelerator(cpu=True)
            >>> accelerator.end_training()  # waits for saves, finishes trackers, ends the process group
        """
        self.strategy.finish()
        try:
            self.wait_for_save()
        finally:
            if self.preemption is not None:
                self.preemption.remove()
                self.preemption = None
            if self._monitor is not None:
                self._monitor.finish()
            try:
                self._tracking.finish()
            finally:
                self._forget()
                if self.num_processes > 1:
                    release_memory()  # models in reference cycles, such as those of FSDP 2, keep the group's threads
                else:
                    self.process_state.device_backend.empty_cache()  # collecting garbage takes 0.2 s
                try:
                    self._checkpointer.close()
                finally:
                    self.strategy.close()
                    config_resolution.release_state(self)
                    self.process_state.destroy_process_group()

    # -- properties, of which most read an attribute of a part -------------------------------------------------------

    @property
    def distributed_type(self) -> DistributedType:
        """How the run is distributed."""
        return self.state.distributed_type

    @property
    def project_configuration(self) -> ProjectConfiguration:
        """Directories and checkpoint naming."""
        return self._checkpointer.project

    @project_configuration.setter
    def project_configuration(self, project_configuration: ProjectConfiguration) -> None:
        self._checkpointer.project = project_configuration

    @property
    def save_in_flight(self) -> bool:
        """True if a save that was started with ``blocking=False`` is still being written on this rank."""
        return self._checkpointer.save_in_flight

    @property
    def log_with(self) -> list[Any]:
        """The tracker classes and objects given as ``log_with``."""
        return self._tracking.log_with

    @property
    def trackers(self) -> list[Any]:
        """The trackers that run in this process, after everything logged so far was delivered to them."""
        return self._tracking.trackers

    @trackers.setter
    def trackers(self, trackers: list[Any]) -> None:
        self._tracking.replace_trackers(trackers)

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        return self.process_state.device

    @property
    def num_processes(self) -> int:
        """The world size."""
        return self.process_state.num_processes

    @property
    def process_index(self) -> int:
        """The rank."""
        return self.process_state.process_index

    @property
    def local_process_index(self) -> int:
        """The rank among the processes of this node."""
        return self.process_state.local_process_index

    @property
    def stands_by(self) -> bool:
        """True if another replica of a fault-tolerant run logs and saves."""
        return self.process_state.stands_by

    @property
    def multi_device(self) -> bool:
        """True if several processes train, each with the full model on its own device."""
        return self.process_state.use_distributed

    @property
    def mixed_precision(self) -> str:
        """The precision of computation."""
        return self.state.mixed_precision

    @property
    def native_amp(self) -> bool:
        """True if torch's own autocast computes in mixed precision."""
        return self.precision.is_native

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """True if the last step of any prepared optimizer was skipped: gradients overflowed, or a replica failed."""
        return any(optimizer.step_was_skipped for optimizer in self.prepared.optimizers)

    @property
    def sync_gradients(self) -> bool:
        """True if the current batch ends an accumulation window."""
        return self.gradient_state.sync_gradients

    @sync_gradients.setter
    def sync_gradients(self, sync_gradients: bool) -> None:
        self.gradient_state.sync_gradients = sync_gradients

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro batches per optimizer step."""
        return self._accumulation.num_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, gradient_accumulation_steps: int) -> None:
        self._accumulation.set_num_steps(gradient_accumulation_steps)

    @property
    def step(self) -> int:
        """Micro batches since the loop began; the last one of a loader is 0, and the next epoch counts from 1.

        Assigning a number that is a multiple of ``gradient_accumulation_steps`` begins a new window.
        """
        return self._accumulation.count

    @step.setter
    def step(self, step: int) -> None:
        self._accumulation.set_count(step)

    @property
    def split_batches(self) -> bool:
        """True if a loader's batch size is that of all processes together."""
        return self.dataloader_config.split_batches

    @property
    def dispatch_batches(self) -> bool | None:
        """True if rank 0 reads for all ranks; None decides by the type of the data set."""
        return self.dataloader_config.dispatch_batches

    @property
    def even_batches(self) -> bool:
        """True if all ranks get the same number of full batches."""
        return self.dataloader_config.even_batches

    @even_batches.setter
    def even_batches(self, value: bool) -> None:
        self.dataloader_config.even_batches = value

    @property
    def use_seedable_sampler(self) -> bool:
        """True if the order of shuffled data is determined by a seed and the epoch."""
        return self.dataloader_config.use_seedable_sampler

    @property
    def non_blocking(self) -> bool:
        """True if batches are copied to the device while it computes."""
        return self.dataloader_config.non_blocking

    @property
    def use_stateful_dataloader(self) -> bool:
        """True if loaders are torchdata's stateful ones."""
        return self.dataloader_config.use_stateful_dataloader

    @property
    def project_dir(self) -> str | None:
        """The directory of everything that is saved."""
        return self.project_configuration.project_dir

    @property
    def logging_dir(self) -> str | None:
        """The directory of tracker logs."""
        return self.project_configuration.logging_dir

    @property
    def save_iteration(self) -> int:
        """The number of the next automatically named checkpoint."""
        return self.project_configuration.iteration

    @property
    def should_save_model(self) -> bool:
        """True if this process writes a model that is saved in full."""
        return self.process_state.is_main_process

    @property
    def data_parallel_rank(self) -> int:
        """The coordinate among replicas of the model."""
        return self.strategy.axis_rank("dp_replicate")

    @property
    def data_parallel_shard_rank(self) -> int:
        """The coordinate among the shards of a replica; 0 if models are not sharded."""
        return self.strategy.axis_rank("dp_shard")

    @property
    def tensor_parallel_rank(self) -> int:
        """The tensor-parallel coordinate; 0 if layers are not sharded."""
        return self.strategy.axis_rank("tp")

    @property
    def context_parallel_rank(self) -> int:
        """The context-parallel coordinate; 0 if sequences are not sharded."""
        return self.strategy.axis_rank("cp")

    @property
    def pipeline_parallel_rank(self) -> int:
        """The pipeline stage; 0 without a pipeline."""
        return self.strategy.axis_rank("pp")

    @property
    def parallelism_config(self) -> Any:
        """Sizes of the mesh axes; None without a mesh."""
        return self.state.parallelism_config

    @property
    def torch_device_mesh(self) -> Any:
        """The device mesh of the parallelism_config; None without one.

        FSDP 2 alone has a mesh of its own, which callers must not take for one: TRL looks up its dimensions in the
        parallelism_config.
        """
        return None if self.parallelism_config is None else getattr(self.strategy, "mesh", None)

    @property
    def is_composable_parallelism_enabled(self) -> bool:
        """True if there is a device mesh, so that several kinds of parallelism can be combined."""
        return self.torch_device_mesh is not None

    @property
    def is_fsdp2(self) -> bool:
        """True if models are sharded by FSDP 2."""
        return self.state.is_fsdp2

    @property
    def deepspeed_plugin(self) -> Any:
        """The DeepSpeed settings in use; None without DeepSpeed."""
        return self.state.deepspeed_plugin

    @property
    def deepspeed_config(self) -> dict[str, Any] | None:
        """The configuration of the DeepSpeed settings in use; None without DeepSpeed."""
        plugin = self.deepspeed_plugin
        return None if plugin is None else plugin.deepspeed_config

    @property
    def deepspeed_engine_wrapped(self) -> Any:
        """The DeepSpeed engine that was prepared last, as a DeepSpeedEngineWrapper; None without one."""
        return getattr(self.strategy, "engine_wrapped", None)

    @property
    def fp8_backend(self) -> str | None:
        """The back end that computes in 8 bits; None in other precisions."""
        return getattr(self.precision, "backend", None)

    @property
    def fp8_enabled(self) -> bool:
        """True if models compute in 8-bit floating point."""
        return self.mixed_precision == "fp8"

    @property
    def has_fp8_handler(self) -> bool:
        """True if ``kwargs_handlers`` has a recipe of 8-bit floating point."""
        return self.fp8_recipe_handler is not None

    @property
    def delayed_fp8_autocast(self) -> bool:
        """True if 8-bit autocast starts after ``prepare``; always False, because the layers themselves compute so."""
        return False

    @property
    def has_lomo_optimizer(self) -> bool:
        """True if a LOMO optimizer was prepared, whose backward pass is :meth:`lomo_backward`."""
        return bool(lomo.fused_optimizers(self.prepared.optimizers))

    autocast_handler: AutocastKwargs | None = _handler(AutocastKwargs)
    ddp_handler: DistributedDataParallelKwargs | None = _handler(DistributedDataParallelKwargs)
    scaler_handler: GradScalerKwargs | None = _handler(GradScalerKwargs)
    init_handler: InitProcessGroupKwargs | None = _handler(InitProcessGroupKwargs)
    profile_handler: ProfileKwargs | None = _handler(ProfileKwargs)
    fp8_recipe_handler: FP8Kwargs | None = _handler(FP8Kwargs)
    ao_recipe_handler: AORecipeKwargs | None = _handler(AORecipeKwargs)
    te_recipe_handler: TERecipeKwargs | None = _handler(TERecipeKwargs)
    msamp_recipe_handler: MSAMPRecipeKwargs | None = _handler(MSAMPRecipeKwargs)

    @property
    def _custom_objects(self) -> list[Any]:
        return self._checkpointer.custom_objects

    @property
    def _models(self) -> list[Any]:
        return self.prepared.models

    @_models.setter
    def _models(self, models: list[Any]) -> None:
        self.prepared.models[:] = models  # the accumulation reads this list

    @property
    def _optimizers(self) -> list[Any]:
        return self.prepared.optimizers

    @property
    def _schedulers(self) -> list[Any]:
        return self.prepared.schedulers

    @property
    def _dataloaders(self) -> list[Any]:
        return self.prepared.dataloaders


def _resumption(checkpoint: Location | None, loaders: Sequence[Any]) -> str:
    """Describe where a training continues: in the epoch of its first loader."""
    if checkpoint is None:
        return "resume() found no state: the training starts at its beginning."
    loader = next((loader for loader in loaders if isinstance(loader, PreparedLoader)), None)
    if loader is None:
        return f"the training continues from {checkpoint}."
    point = loader.state_dict()
    epoch = point["epoch"]
    if point["position"] and not point["finished"]:
        return f"the training continues from {checkpoint}, after {point['position']} {point['unit']} of epoch {epoch}."
    complete = epoch + 1 if point["finished"] else epoch
    left = f"; a loop of {counted(complete, 'epoch')} has nothing left to do" if complete else ""
    return f"the training continues from {checkpoint}, after {counted(complete, 'complete epoch')}{left}."


def _tensors(parameters: Any, call: str) -> list[torch.Tensor]:
    """Return the parameters given to a function that clips their gradients."""
    if isinstance(parameters, torch.Tensor):
        return [parameters]
    hint = "Pass tensors, such as model.parameters()."
    if isinstance(parameters, nn.Module):
        hint = "Pass its parameters: model.parameters()."
    check_type(parameters, Iterable, call, hint)
    chosen = list(parameters)
    if chosen and not isinstance(chosen[0], torch.Tensor):
        check_type(chosen[0], torch.Tensor, call, hint)
    return chosen

"""The Accelerator: the one object a training script talks to. It resolves its arguments once and delegates."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from accel_data import DataLoaderConfiguration, skip_first_batches
from accel_state import (
    ConfigurationError,
    DistributedType,
    DynamoBackend,
    GradientAccumulationPlugin,
    PrecisionType,
    RNGType,
)
from accel_state.memory import release_memory
from accel_state.state.process_control import ProcessControl

from .checkpoint.checkpointer import StateSaving
from .checkpoint.project import ProjectConfiguration
from .checkpoint.weights_methods import Saving
from .core import config_resolution
from .core.compile import TorchDynamoPlugin
from .core.prepare import Preparation
from .kwargs.base import Handlers, KwargsHandler
from .kwargs.handlers import AutocastKwargs, ProfileKwargs, TrackingKwargs
from .optimizer import AcceleratedOptimizer
from .precision.scaler import SharedGradScaler
from .preemption.handler import Resuming, SaveOnSignal
from .properties import SettingsView
from .scheduler import AcceleratedScheduler
from .strategies.base import Strategy
from .training import lomo
from .training.gather_for_metrics import Gathering
from .training.gradient_accumulation import Accumulation, ItemReduction
from .training.uneven_inputs import join_uneven_inputs


class Accelerator(SettingsView, Gathering, Saving, StateSaving, Resuming, ProcessControl):
    """Runs a PyTorch training loop on whatever it was started on.

    Args:
        device_placement: move prepared models and batches to the device.
        split_batches: older place of ``DataLoaderConfiguration(split_batches=...)``.
        mixed_precision: "no", "fp16", "bf16" or "fp8"; None takes the launcher's choice, and "no" without one.
        gradient_accumulation_steps: micro batches an optimizer step; the launcher's number wins over it.
        cpu: stay on the CPU even if there is an accelerator.
        dataloader_config: how loaders are sharded.
        deepspeed_plugin: settings of DeepSpeed.
        fsdp_plugin: settings of fully sharded data parallelism.
        torch_tp_plugin: settings of tensor parallelism.
        megatron_lm_plugin: settings of Megatron-LM.
        rng_types: generators that loaders synchronise over ranks at each epoch; by default the sampler's own
            ("generator").
        log_with: experiment trackers: a name (LoggerType), a class or an object, "all" that are installed, or a list of
            those.
        project_dir: the folder of everything that is saved.
        project_config: folders and checkpoint naming.
        gradient_accumulation_plugin: all settings of gradient accumulation.
        step_scheduler_with_optimizer: advance prepared schedulers when their optimizer steps, by as many steps as there
            are processes (one, with ``split_batches``). Turn it off if the loop steps the scheduler at other times, for
            example once an epoch.
        kwargs_handlers: AutocastKwargs, DistributedDataParallelKwargs, GradScalerKwargs, InitProcessGroupKwargs,
            ProfileKwargs, TrackingKwargs.
        dynamo_backend: back end of torch.compile.
        dynamo_plugin: all settings of torch.compile.
        deepspeed_plugins: several settings of DeepSpeed, by name.
        parallelism_config: sizes of the mesh axes.
        save_on_signal: save and end when told to: True for SIGTERM and SIGUSR1, other signals, or SaveOnSignal. See
            :meth:`resume`.
        strategy: how models are wrapped, synchronised and saved: a Strategy object, or the name of a registered one.
            By default it follows from the plugins and the launcher.

    Raises:
        ConfigurationError: an argument that is not known, contradicts another, or cannot run on this machine.
    """

    def __init__(
        self,
        device_placement: bool = True,
        split_batches: bool = config_resolution.UNSET,
        mixed_precision: PrecisionType | str | None = None,
        gradient_accumulation_steps: int = 1,
        cpu: bool = False,
        dataloader_config: DataLoaderConfiguration | None = None,
        deepspeed_plugin: Any = None,
        fsdp_plugin: Any = None,
        torch_tp_plugin: Any = None,
        megatron_lm_plugin: Any = None,
        rng_types: list[str | RNGType] | None = None,
        log_with: Any = None,
        project_dir: str | os.PathLike[str] | None = None,
        project_config: ProjectConfiguration | None = None,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        step_scheduler_with_optimizer: bool = True,
        kwargs_handlers: list[KwargsHandler] | None = None,
        dynamo_backend: DynamoBackend | str | None = None,
        dynamo_plugin: TorchDynamoPlugin | None = None,
        deepspeed_plugins: Any = None,
        parallelism_config: Any = None,
        save_on_signal: SaveOnSignal | bool | str | Sequence[str] | None = None,
        strategy: Strategy | str | None = None,
    ) -> None:
        self.project_configuration = config_resolution.project_settings(project_dir, project_config)
        self.dataloader_config = config_resolution.loader_settings(dataloader_config, split_batches)
        self.device_placement = device_placement
        self.step_scheduler_with_optimizer = step_scheduler_with_optimizer
        self.rng_types = config_resolution.rng_settings(rng_types)
        self.handlers = Handlers(kwargs_handlers)
        self._init_tracking(log_with, self.project_configuration.logging_dir, self.handlers.get(TrackingKwargs))
        parts = config_resolution.build(
            self.handlers,
            owner=self,
            strategy=strategy,
            mixed_precision=mixed_precision,
            cpu=cpu,
            accumulation_plugin=config_resolution.accumulation_settings(
                gradient_accumulation_steps, gradient_accumulation_plugin
            ),
            dynamo=config_resolution.dynamo_settings(dynamo_backend, dynamo_plugin),
            engines={
                "deepspeed": deepspeed_plugin if deepspeed_plugin is not None else deepspeed_plugins,
                "fsdp": fsdp_plugin,
                "torch_tp": torch_tp_plugin,
                "megatron": megatron_lm_plugin,
                "mesh": parallelism_config,
            },
        )
        self.state = parts.state
        self.process_state = parts.process
        self.gradient_state = parts.gradient_state
        self.strategy = parts.strategy
        # Asked once: this is in the way of every step.
        self._engine_strategy = parts.strategy if parts.strategy.uses_engine else None
        self.precision = parts.precision
        self.scaler = parts.precision.scaler
        self.prepared = Preparation(
            parts, self.dataloader_config, device_placement, step_scheduler_with_optimizer, self.rng_types
        )
        self._accumulation = Accumulation(
            parts.process, parts.gradient_state, parts.accumulation_plugin, parts.strategy, lambda: self.prepared.models
        )
        self._custom_objects: list[Any] = []
        self._init_state_saving()
        self._init_resuming(save_on_signal)
        self._trigger = False

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Prepare models, optimizers, schedulers and loaders, given in any order.

        Args:
            *args: the objects; those of other kinds pass through.
            device_placement: for each of them, whether it is moved to the device; by default as the Accelerator says.

        Returns:
            The prepared object, or a tuple of them in the order given.

        Raises:
            ConfigurationError: ``device_placement`` is not of the length of ``args``, or a model cannot be trained
                here.
        """
        places: list[bool | None] = [None] * len(args) if device_placement is None else list(device_placement)
        if len(places) != len(args):
            raise ConfigurationError(
                f"device_placement has {len(places)} values for {len(args)} objects. Give one for each."
            )
        result = self.prepared.prepare(args, places)
        return result[0] if len(result) == 1 else tuple(result)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Prepare a model.

        Args:
            model: the model.
            device_placement: move it to the device; by default as the Accelerator says.
            evaluation_mode: it will not be trained, so gradients need no synchronisation.
        """
        return self.prepared.model(model, device_placement, evaluation_mode)

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> AcceleratedOptimizer:
        """Prepare an optimizer; ``device_placement`` moves its state to the device."""
        return self.prepared.optimizer(optimizer, device_placement)

    def prepare_scheduler(self, scheduler: Any) -> AcceleratedScheduler:
        """Prepare a scheduler, after its optimizer."""
        return self.prepared.scheduler(scheduler)

    def prepare_data_loader(
        self,
        data_loader: DataLoader[Any],
        device_placement: bool | None = None,
        slice_fn_for_dispatch: Callable[..., Any] | None = None,
    ) -> Any:
        """Prepare a loader: each process gets its share of the data.

        Args:
            data_loader: the loader.
            device_placement: move batches to the device; by default as the Accelerator says.
            slice_fn_for_dispatch: cuts a batch that one process reads for all; `accel_state.operations.slice_tensors`
                by default.
        """
        return self.prepared.data_loader(data_loader, device_placement, slice_fn_for_dispatch)

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """A loader like the given one whose first epoch starts ``num_batches`` later; map-style data is not read to get
        there.
        """
        return skip_first_batches(dataloader, num_batches=num_batches)

    def deepspeed_ulysses_dl_adapter(self, dl: Any, model: nn.Module) -> Any:
        """The loader that DeepSpeed's sequence parallelism (Ulysses) reads from; the given one where sequences are not
        shared.

        Args:
            dl: a prepared loader.
            model: the prepared model.
        """
        return self.strategy.sequence_parallel_loader(dl, model)

    def unwrap_model(
        self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> nn.Module:
        """The model that was prepared.

        Args:
            model: a prepared model.
            keep_fp32_wrapper: keep mixed precision's autocast around its forward.
            keep_torch_compile: keep it compiled.
        """
        return self.strategy.unwrap(model, keep_fp32_wrapper, keep_torch_compile)

    def accumulate(self, *models: nn.Module) -> AbstractContextManager[None]:
        """One micro batch: in the block, gradients are synchronised and applied only if it ends an accumulation window.

        Args:
            *models: the models whose gradients accumulate; all prepared ones by default.
        """
        return self._accumulation.step(models)

    def backward(
        self,
        loss: torch.Tensor,
        *,
        num_items: int | torch.Tensor | None = None,
        reduction: ItemReduction = "mean",
        **kwargs: Any,
    ) -> None:
        """Compute gradients, with the loss weighed for accumulation and scaled for fp16.

        Args:
            loss: the loss of this micro batch on this rank.
            num_items: how many items (tokens, pixels, ...) the loss is made of. With it, gradients are those of the
                mean over all items of the accumulation window on all ranks, however unevenly they are spread; without
                it every micro batch counts the same.
            reduction: whether ``loss`` is the "mean" or the "sum" of the ``num_items`` items; use "sum" where a micro
                batch may have none.
            **kwargs: for ``torch.Tensor.backward``; or ``learning_rate``, for optimizers that update in the backward
                pass.

        Raises:
            ConfigurationError: only some losses of a window have ``num_items``.
        """
        loss = (
            self._accumulation.weigh(loss)
            if num_items is None
            else self._accumulation.weigh_items(loss, num_items, reduction)
        )
        if "learning_rate" in kwargs:
            self.lomo_backward(loss, kwargs["learning_rate"])
            return
        if self._engine_strategy is not None:
            self._engine_strategy.backward(loss, self._accumulation.current is not None, **kwargs)
            return
        if self.scaler is not None:
            loss = self.scaler.scale(loss)
        loss.backward(**kwargs)

    def lomo_backward(self, loss: torch.Tensor, learning_rate: float) -> None:
        """Compute gradients and update weights in one pass, with the prepared Lomo or AdaLomo optimizers.

        Raises:
            ConfigurationError: no prepared optimizer does so.
        """
        lomo.fused_backward(self.prepared.optimizers, loss, learning_rate)

    def maybe_context_parallel(
        self,
        buffers: list[torch.Tensor] | None = None,
        buffer_seq_dims: list[int] | None = None,
        no_restore_buffers: set[torch.Tensor] | None = None,
    ) -> AbstractContextManager[None]:
        """A block in which sequences are shared by the processes of the context-parallel axis; whole sequences without
        one.

        Args:
            buffers: the tensors to split along their sequence dimension.
            buffer_seq_dims: that dimension of each of them.
            no_restore_buffers: those of them that need not be whole again afterwards.
        """
        return self.strategy.context_parallel(buffers, buffer_seq_dims, no_restore_buffers)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """A block in which backward passes do not synchronise the model's gradients; nothing to skip in a single
        process.
        """
        return self.strategy.no_sync(model)

    def trigger_sync_in_backward(self, model: nn.Module) -> AbstractContextManager[None]:
        """A block whose backward pass synchronises gradients although its forward ran under :meth:`no_sync`."""
        return self.strategy.sync_in_backward(model)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Divide gradients by the loss scale, once a step; nothing while they accumulate, or without a loss scale.

        Args:
            optimizer: a prepared optimizer, or several; all of them by default.
        """
        if self.scaler is None or not self.sync_gradients:
            return
        chosen = (
            self.prepared.optimizers
            if optimizer is None
            else optimizer
            if isinstance(optimizer, (list, tuple))
            else [optimizer]
        )
        for one in chosen:
            self.scaler.unscale_(one.optimizer if isinstance(one, AcceleratedOptimizer) else one)

    def clip_grad_norm_(
        self, parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2
    ) -> torch.Tensor:
        """Clip the norm of all gradients together.

        While gradients accumulate they are incomplete, so they are measured and left as they are.

        Args:
            parameters: the parameters whose gradients are clipped.
            max_norm: the largest norm to let through.
            norm_type: the p of the norm; ``inf`` for the largest element.

        Returns:
            The norm before clipping, unscaled, equal on all ranks after synchronisation.
        """
        self.unscale_gradients()
        chosen = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        limit = max_norm if self.sync_gradients else float("inf")
        return self.strategy.clip_grad_norm(chosen, limit, norm_type)

    def clip_grad_value_(self, parameters: torch.Tensor | Iterable[torch.Tensor], clip_value: float) -> None:
        """Clip every element of the gradients to ``[-clip_value, clip_value]``; nothing while they accumulate."""
        self.unscale_gradients()
        if self.sync_gradients:
            self.strategy.clip_grad_value(
                [parameters] if isinstance(parameters, torch.Tensor) else list(parameters), clip_value
            )

    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> AbstractContextManager[None]:
        """A block that computes in mixed precision; prepared models do so by themselves.

        Args:
            autocast_handler: settings for this block; by default those given to the Accelerator.
        """
        return self.precision.autocast(autocast_handler)

    def join_uneven_inputs(
        self, joinables: list[Any], even_batches: bool | None = None
    ) -> AbstractContextManager[None]:
        """A block whose loop may end earlier on some ranks than on others.

        Args:
            joinables: the prepared models (and other joinable objects) that train in the block.
            even_batches: override of the loaders' ``even_batches`` within the block.

        Raises:
            ConfigurationError: the precision needs all ranks at every step.
        """
        self.precision.check_uneven_inputs()
        return join_uneven_inputs(self.strategy, self.prepared.dataloaders, joinables, even_batches)

    def wait_for_everyone(self) -> None:
        """Return when every process has come here; at once in a single process."""
        self.process_state.wait_for_everyone()

    def set_trigger(self) -> None:
        """Raise a flag on this rank, for all ranks to see at their next :meth:`check_trigger`."""
        self._trigger = True

    def check_trigger(self) -> bool:
        """Whether any rank raised the flag since the last check; every rank must ask. Lowers it again."""
        flag = torch.tensor(int(self._trigger), device=self.device)
        raised = bool(self.process_state.collectives.all_reduce(flag, "max").item())
        self._trigger = False
        return raised

    set_breakpoint = set_trigger
    check_breakpoint = check_trigger

    def free_memory(self, *objects: Any) -> list[Any]:
        """Drop every reference to prepared objects, and hand unused memory back to the device.

        Args:
            *objects: variables of the caller to drop as well.

        Returns:
            As many Nones: ``model, optimizer = accelerator.free_memory(model, optimizer)``.
        """
        self.prepared.forget()
        self._accumulation.forget()
        self.strategy.forget()
        if isinstance(self.scaler, SharedGradScaler):
            self.scaler.forget()
        return release_memory(*objects)

    def clear(self, *objects: Any) -> list[Any]:
        """The same as :meth:`free_memory`."""
        return self.free_memory(*objects)

    @contextmanager
    def profile(self, profile_handler: ProfileKwargs | None = None) -> Iterator[torch.profiler.profile]:
        """Record what the block does.

        Args:
            profile_handler: what to record; by default the ProfileKwargs given to the Accelerator.

        Yields:
            The profiler; call its ``step()`` after each training step if a schedule is set.
        """
        settings = profile_handler or self.handlers.get(ProfileKwargs)
        with settings.build() as profiler:
            yield profiler
        if settings.output_trace_dir is not None:
            folder = Path(settings.output_trace_dir)
            folder.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(folder / f"profile_{self.process_index}.json"))
            self.wait_for_everyone()

    def end_training(self) -> None:
        """Finish the save that is under way and the trackers, and let go of the process group and of the shared state.

        Call it at the end of the script, on every rank.

        Raises:
            CheckpointError: a save that was started with ``blocking=False`` has failed.
            TrackerError: in strict mode (TrackingKwargs), a tracker has failed.
        """
        try:
            self.wait_for_save()
        finally:
            self._stop_watching_signals()
            try:
                self._finish_trackers()
            finally:
                self.free_memory()
                self.strategy.close()
                config_resolution.release_state(self)
                self.process_state.destroy_process_group()

    def verify_device_map(self, model: nn.Module) -> bool:
        """Whether a model was spread over several devices by a device map."""
        return any(len(getattr(module, "hf_device_map", {})) > 1 for module in model.modules())

    @property
    def distributed_type(self) -> DistributedType:
        """The kind of run."""
        return self.state.distributed_type

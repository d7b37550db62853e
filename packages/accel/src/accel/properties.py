"""The properties of an Accelerator."""

from __future__ import annotations

from typing import Any, TypeVar

import torch

from accel_data import DataLoaderConfiguration
from accel_state import AcceleratorState, DistributedType, GradientState, PartialState
from accel_state.state.process_control import ProcessControl
from accel_track.tracking import TrackerRun

from .checkpointer.checkpointer import Checkpointer
from .contract.strategy import Strategy
from .core.project import ProjectConfiguration
from .kwargs.base import Handlers, KwargsHandler
from .kwargs.ddp import DistributedDataParallelKwargs
from .kwargs.fp8 import AORecipeKwargs, FP8Kwargs, MSAMPRecipeKwargs, TERecipeKwargs
from .kwargs.handlers import AutocastKwargs, GradScalerKwargs, InitProcessGroupKwargs, ProfileKwargs
from .precision.full import Precision
from .setup.prepare import Preparation
from .training import lomo
from .training.gradient_accumulation import Accumulation

H = TypeVar("H", bound=KwargsHandler)


class AcceleratorProperties(ProcessControl):
    """The properties of an Accelerator; most read an attribute of one of its parts."""

    handlers: Handlers
    state: AcceleratorState
    process_state: PartialState
    gradient_state: GradientState
    precision: Precision
    strategy: Strategy
    prepared: Preparation
    dataloader_config: DataLoaderConfiguration
    _accumulation: Accumulation
    _checkpointer: Checkpointer
    _tracking: TrackerRun

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
        """Whether a save that was started with ``blocking=False`` is still being written on this rank."""
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
    def stands_by(self) -> bool:  # type: ignore[override]
        """Whether another replica of a fault-tolerant run logs and saves."""
        return self.process_state.stands_by

    @property
    def multi_device(self) -> bool:
        """Whether several processes train, each with the full model on its own device."""
        return self.process_state.use_distributed

    @property
    def mixed_precision(self) -> str:
        """The precision of computation."""
        return self.state.mixed_precision

    @property
    def native_amp(self) -> bool:
        """Whether torch's own autocast computes in mixed precision."""
        return self.precision.is_native

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether the last step of any prepared optimizer was skipped: gradients overflowed, or a replica failed."""
        return any(optimizer.step_was_skipped for optimizer in self.prepared.optimizers)

    @property
    def sync_gradients(self) -> bool:
        """Whether the current batch ends an accumulation window."""
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
        """Whether a loader's batch size is that of all processes together."""
        return self.dataloader_config.split_batches

    @property
    def dispatch_batches(self) -> bool | None:
        """Whether rank 0 reads for all ranks; None decides by the type of the data set."""
        return self.dataloader_config.dispatch_batches

    @property
    def even_batches(self) -> bool:
        """Whether all ranks get the same number of full batches."""
        return self.dataloader_config.even_batches

    @even_batches.setter
    def even_batches(self, value: bool) -> None:
        self.dataloader_config.even_batches = value

    @property
    def use_seedable_sampler(self) -> bool:
        """Whether the order of shuffled data is determined by a seed and the epoch."""
        return self.dataloader_config.use_seedable_sampler

    @property
    def non_blocking(self) -> bool:
        """Whether batches are copied to the device while it computes."""
        return self.dataloader_config.non_blocking

    @property
    def use_stateful_dataloader(self) -> bool:
        """Whether loaders are torchdata's stateful ones."""
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
        """Whether this process writes a model that is saved in full."""
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
        """Whether there is a device mesh, so that several kinds of parallelism can be combined."""
        return self.torch_device_mesh is not None

    @property
    def is_fsdp2(self) -> bool:
        """Whether models are sharded by FSDP 2."""
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
        """Whether models compute in 8-bit floating point."""
        return self.mixed_precision == "fp8"

    @property
    def has_fp8_handler(self) -> bool:
        """Whether ``kwargs_handlers`` has a recipe of 8-bit floating point."""
        return self.fp8_recipe_handler is not None

    @property
    def delayed_fp8_autocast(self) -> bool:
        """Whether 8-bit autocast starts after ``prepare``; always False, because the layers themselves compute so."""
        return False

    @property
    def has_lomo_optimizer(self) -> bool:
        """Whether a LOMO optimizer was prepared, whose backward pass is :meth:`lomo_backward`."""
        return bool(lomo.fused_optimizers(self.prepared.optimizers))

    @property
    def autocast_handler(self) -> AutocastKwargs | None:
        """The AutocastKwargs given in ``kwargs_handlers``, or None; the properties that follow are the same."""
        return self._handler(AutocastKwargs)

    @property
    def ddp_handler(self) -> DistributedDataParallelKwargs | None:
        """The DistributedDataParallelKwargs, or None."""
        return self._handler(DistributedDataParallelKwargs)

    @property
    def scaler_handler(self) -> GradScalerKwargs | None:
        """The GradScalerKwargs, or None."""
        return self._handler(GradScalerKwargs)

    @property
    def init_handler(self) -> InitProcessGroupKwargs | None:
        """The InitProcessGroupKwargs, or None."""
        return self._handler(InitProcessGroupKwargs)

    @property
    def profile_handler(self) -> ProfileKwargs | None:
        """The ProfileKwargs, or None."""
        return self._handler(ProfileKwargs)

    @property
    def fp8_recipe_handler(self) -> FP8Kwargs | None:
        """The recipe of 8-bit floating point, or None."""
        return self._handler(FP8Kwargs)

    @property
    def ao_recipe_handler(self) -> AORecipeKwargs | None:
        """The AORecipeKwargs, or None."""
        return self._handler(AORecipeKwargs)

    @property
    def te_recipe_handler(self) -> TERecipeKwargs | None:
        """The TERecipeKwargs, or None."""
        return self._handler(TERecipeKwargs)

    @property
    def msamp_recipe_handler(self) -> MSAMPRecipeKwargs | None:
        """The MSAMPRecipeKwargs, or None."""
        return self._handler(MSAMPRecipeKwargs)

    def _handler(self, kind: type[H]) -> H | None:
        return next(iter(self.handlers.all(kind)), None)

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

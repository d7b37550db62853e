"""Preparing models, optimizers, schedulers and loaders, and keeping a list of them."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from accel_data import DataLoaderConfiguration, ElasticLoader, SeedableRandomSampler, get_sampler, prepare_data_loader
from accel_data.other_loaders import is_known_loader
from accel_state import AcceleratorState, GradientAccumulationPlugin
from accel_state.errors import ArgumentTypeError, ConfigurationError, check_type
from accel_state.logging import warn_once

from ..contract.optimizer import AcceleratedOptimizer
from ..contract.scheduler import AcceleratedScheduler
from ..contract.strategy import Strategy
from ..core.compile import TorchDynamoPlugin, compile_model, compile_regions
from ..core.nf4_weights import check_nf4, store_as_bytes
from ..core.quantized_layers import keep_packing, load_scales, quantized_layers
from ..core.unwrap import PREPARED, is_prepared
from ..fsdp.activation_checkpointing import checkpoint_units
from ..fsdp.wrap_policy import find_units, transformer_policy
from ..kwargs.activation_checkpointing import ActivationCheckpointingKwargs
from ..precision.full import Precision
from ..reduction.elastic_steps import ElasticSteps
from ..training.moving_average import MovingAverage, Swap
from ..training.muon import check_hidden, is_muon, spread

T = TypeVar("T")

_PREPARABLE = (nn.Module, nn.Parameter, Optimizer, DataLoader, torch.optim.lr_scheduler.LRScheduler)


@dataclass(eq=False, repr=False)
class Preparation:
    """Prepares objects, and keeps those that were prepared."""

    strategy: Strategy
    precision: Precision
    checkpointing: ActivationCheckpointingKwargs | None
    dynamo: TorchDynamoPlugin | None  # None: models are not compiled
    accumulation_plugin: GradientAccumulationPlugin
    loader_settings: DataLoaderConfiguration
    device_placement: bool
    step_scheduler_with_optimizer: bool
    rng_types: list[str]
    models: list[nn.Module] = field(default_factory=list)
    optimizers: list[AcceleratedOptimizer] = field(default_factory=list)
    schedulers: list[AcceleratedScheduler] = field(default_factory=list)
    dataloaders: list[Any] = field(default_factory=list)
    averages: list[MovingAverage] = field(default_factory=list)
    # Of the averages that are in models now; the innermost block is the last.
    applied: list[Swap] = field(default_factory=list)
    accumulation: Any = None  # the Accelerator's windows
    elastic_steps: ElasticSteps | None = None  # which follows the elastic loaders
    seeded_samplers: dict[int, SeedableRandomSampler] = field(default_factory=dict)  # by the index of their loader
    local_sgd: Any = None  # the LocalSGD of the block that runs, or a loaded state for the next one
    _bytes_of_nf4: Any = None  # what became of 4-bit parameters, for optimizers that have them

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        for loader in self.dataloaders:
            if isinstance(loader, ElasticLoader) and self.elastic_steps is not None:
                self.elastic_steps.follow(loader)
        for optimizer in self.optimizers:
            if isinstance(optimizer, AcceleratedOptimizer):
                optimizer.treat_groups(self._treat_groups)
                optimizer.averages = self.averages
                optimizer.strategy = self.strategy
                optimizer.accumulation = self.accumulation

    def prepare(self, objects: tuple[Any, ...], device_placements: list[bool | None], accelerator: Any) -> list[Any]:
        """Prepare objects by the accelerator's own ``prepare_...`` methods, which a subclass may have overridden."""
        _check_arguments(objects)
        for obj in objects:
            if is_muon(obj) and not is_prepared(obj):
                _ = self.strategy.matrix_collectives  # raises where Muon is refused
        prepared = list(objects)
        for part in (self.precision, self.strategy):
            prepared = list(part.prepare_together(prepared, self))
        for obj in (*self.models, *self.optimizers, *self.schedulers):
            _mark(obj)
        schedulers = []
        for index, (obj, device_placement) in enumerate(zip(prepared, device_placements, strict=True)):
            if isinstance(obj, nn.Module):
                prepared[index] = accelerator.prepare_model(obj, device_placement=device_placement)
            elif isinstance(obj, torch.optim.Optimizer):
                prepared[index] = accelerator.prepare_optimizer(obj, device_placement=device_placement)
            elif not isinstance(obj, DataLoader) and is_scheduler(obj):
                schedulers.append(index)
            elif isinstance(obj, DataLoader) or is_known_loader(obj):
                prepared[index] = accelerator.prepare_data_loader(obj, device_placement=device_placement)
        # Schedulers come last: they belong to prepared optimizers.
        for index in schedulers:
            prepared[index] = accelerator.prepare_scheduler(prepared[index])
        return prepared

    def model(self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False) -> nn.Module:
        """Prepare a model: precision, device, wrapping, compilation."""
        if not isinstance(model, nn.Module):
            check_type(model, nn.Module, "prepare_model", "Pass a model: a torch.nn.Module.")
        if is_prepared(model):
            return _add(self.models, model)
        strategy, dynamo, process = self.strategy, self.dynamo, self.strategy.state
        if strategy.uses_engine:
            prepared: nn.Module = strategy.prepare_together([model], self)[0]
            return _mark(prepared)
        if dynamo is not None:
            self._check_compilation(model)
        strategy.check_model(model)
        if not evaluation_mode and "torchao" in sys.modules:  # else there is no weight of its classes
            check_nf4(model, strategy)
            replaced = store_as_bytes(model)
            if replaced:
                self._note_bytes(replaced)
        dispatched = is_dispatched(model)
        if dispatched and not evaluation_mode and process.num_processes > 1:
            raise ConfigurationError(
                f"{type(model).__name__} was dispatched over several devices or offloaded (hf_device_map), and each "
                f"of the {process.num_processes} processes would train a copy of it. Start one process, or load the "
                "model without a device map; for inference prepare it with evaluation_mode=True."
            )
        self.precision.wrap_forward(model)
        if (self.device_placement if device_placement is None else device_placement) and not dispatched:
            model = strategy.place(model)
        if not evaluation_mode:
            if "bitsandbytes" in sys.modules and quantized_layers(model):
                keep_packing(model, process.device)
                load_scales(model)
            if (settings := self.checkpointing) is not None:
                blocks = transformer_policy(model, settings.block_names, settings.names_setting)
                checkpoint_units(model, find_units(model, blocks), settings)
            model = strategy.wrap(model)
            for optimizer in self.optimizers:
                self._remap(optimizer.optimizer)
            check_hidden(self.optimizers, [model])
        if dynamo is not None:
            model = (compile_regions if dynamo.use_regional_compilation else compile_model)(model, **dynamo.to_kwargs())
        return _add(self.models, model)

    def _check_compilation(self, model: nn.Module) -> None:
        if not self.strategy.supports_compilation:
            raise ConfigurationError(
                f"{type(self.strategy).__name__} does not support compiled models: its calls send activations "
                "between ranks. Leave out dynamo_plugin and dynamo_backend."
            )
        checkpoints = any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
        if checkpoints and AcceleratorState().mixed_precision == "fp8":
            raise ConfigurationError(
                "mixed_precision='fp8' does not support compiled models with gradient checkpointing: recomputed layers "
                "would update their scales twice. Leave out dynamo_plugin and dynamo_backend, or the checkpointing."
            )

    def optimizer(self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None) -> AcceleratedOptimizer:
        if not hasattr(optimizer, "param_groups"):
            check_type(optimizer, torch.optim.Optimizer, "prepare_optimizer", "Pass an optimizer of torch.")
        if isinstance(optimizer, AcceleratedOptimizer) or is_prepared(optimizer):
            return _add(self.optimizers, optimizer)
        place = self.device_placement if device_placement is None else device_placement
        if is_muon(optimizer):
            spread(optimizer, self.strategy, self.models)
        self._treat_groups(optimizer)
        prepared = AcceleratedOptimizer(optimizer, device_placement=place, scaler=self.precision.scaler)
        prepared.treat_groups(self._treat_groups)
        prepared.averages = self.averages
        prepared.strategy = self.strategy
        prepared.accumulation = self.accumulation
        if self.strategy.replicas is not None:
            prepared.step_gate = self.strategy.replicas.applies_step
        self.precision.watch(optimizer)
        return _add(self.optimizers, prepared)

    def _treat_groups(self, optimizer: torch.optim.Optimizer) -> None:
        """Make an optimizer's parameters those of the prepared models, and refuse those that cannot be updated."""
        self._remap(optimizer)
        check_hidden([optimizer], self.models)

    def _note_bytes(self, replaced: list[tuple[nn.Parameter, nn.Parameter]]) -> None:
        from ..fsdp.param_remap import Replacements  # which imports what shards models

        self._bytes_of_nf4 = self._bytes_of_nf4 or Replacements()
        for old, new in replaced:
            self._bytes_of_nf4.add(old, new, torch.Tensor.flatten)  # which are frozen, and have no state

    def _remap(self, optimizer: torch.optim.Optimizer) -> None:
        """Point an optimizer at the parameters that have taken the place of those that it was built with."""
        if self._bytes_of_nf4 is not None:
            self._bytes_of_nf4.apply(optimizer)
        self.strategy.remap_optimizer(optimizer)

    def scheduler(self, scheduler: Any) -> AcceleratedScheduler:
        """Prepare a scheduler, with the prepared optimizer that it drives."""
        if isinstance(scheduler, nn.Module) or not hasattr(scheduler, "step"):
            check_type(
                scheduler, torch.optim.lr_scheduler.LRScheduler, "prepare_scheduler", "Pass a scheduler of torch."
            )
        if isinstance(scheduler, AcceleratedScheduler) or is_prepared(scheduler):
            return _add(self.schedulers, scheduler)
        optimizer = getattr(scheduler, "optimizer", None)
        driven = [prepared for prepared in self.optimizers if prepared.wraps(optimizer)]
        strategy = self.strategy
        # How many batches of a loader's own size a global step has.
        updates = strategy.data_collectives.world_size * strategy.batches_per_process
        if strategy.replicas is not None:
            updates = strategy.replicas.updates_per_step
        prepared = AcceleratedScheduler(
            scheduler,
            driven or self.optimizers,
            step_with_optimizer=self.step_scheduler_with_optimizer,
            split_batches=self.loader_settings.split_batches or self.loader_settings.elastic,
            num_processes=updates,
        )
        return _add(self.schedulers, prepared)

    def data_loader(
        self,
        data_loader: DataLoader[Any],
        device_placement: bool | None = None,
        slice_fn_for_dispatch: Callable[..., Any] | None = None,
    ) -> Any:
        """Prepare a loader: its share of the data, and its device."""
        if is_prepared(data_loader):
            return _add(self.dataloaders, data_loader)
        process = self.strategy.state
        prepared = prepare_data_loader(
            data_loader,
            process.device,
            num_processes=process.num_processes,
            process_index=process.process_index,
            torch_device_mesh=self.strategy.data_mesh,
            put_on_device=self.device_placement if device_placement is None else device_placement,
            rng_types=self.rng_types,
            slice_fn_for_dispatch=slice_fn_for_dispatch,
            batches_per_step=self.strategy.batches_per_process,
            **asdict(self.loader_settings),
        )
        replicas, settings = self.strategy.replicas, self.loader_settings
        if replicas is not None:
            prepared = replicas.share_loader(prepared, settings.split_batches, settings.even_batches)
        if isinstance(prepared, ElasticLoader) and self.elastic_steps is not None:
            self.elastic_steps.follow(prepared)
        sampler = get_sampler(prepared)
        if isinstance(sampler, SeedableRandomSampler):
            self.seeded_samplers[len(self.dataloaders)] = sampler
        return _add(self.dataloaders, prepared)

    def forget(self) -> None:
        for prepared in (self.models, self.optimizers, self.schedulers, self.dataloaders, self.averages):
            prepared.clear()
        self.seeded_samplers.clear()
        self.local_sgd = None


def _check_arguments(objects: Iterable[Any]) -> None:
    """Refuse numbers and texts as arguments of ``prepare``, and warn about objects that hold what it prepares.

    Raises:
        ArgumentTypeError: an object is a number or a text.
    """
    for index, obj in enumerate(objects):
        if isinstance(obj, (int, float, complex, str, bytes)):
            raise ArgumentTypeError(
                f"prepare() got {obj!r}, a {type(obj).__name__}, as object {index + 1}. Pass models, optimizers, "
                "schedulers and loaders."
            )
        items = obj.values() if isinstance(obj, dict) else obj if isinstance(obj, (list, tuple, set)) else ()
        held = next(filter(lambda item: isinstance(item, _PREPARABLE), items), None)
        hint = None
        if held is not None:
            hint = (
                f"a {type(obj).__name__} with a {type(held).__name__}. Pass the objects themselves: prepare(*objects)"
            )
        elif isinstance(obj, type) and issubclass(obj, _PREPARABLE):
            hint = f"the class {obj.__name__}. Pass an object of it"
        elif isinstance(obj, types.GeneratorType):
            hint = "a generator, such as model.parameters(). Pass the model"
        elif isinstance(obj, Dataset) and not is_known_loader(obj):
            hint = f"the data set {type(obj).__name__}. Pass a DataLoader of it"
        if hint is not None:
            warn_once(__name__, f"prepare() got {hint}; it was returned unprepared.")


def _mark(obj: T) -> T:
    setattr(obj, PREPARED, True)
    return obj


def _add(prepared: list[Any], obj: Any) -> Any:
    """Mark an object as prepared, and add it to a list unless it is there."""
    setattr(obj, PREPARED, True)
    for known in prepared:
        if known is obj:
            return obj
    prepared.append(obj)
    return obj


def is_dispatched(model: nn.Module) -> bool:
    """Return True if a model was dispatched or offloaded, so that it must not be moved as a whole."""
    devices = set(map(str, getattr(model, "hf_device_map", {}).values()))
    if len(devices) > 1 or "disk" in devices:
        return True
    for module in model.modules():
        hook = getattr(module, "_hf_hook", None)
        for single in getattr(hook, "hooks", (hook,)):
            if getattr(single, "offload", False) is True:
                return True
    return False


def is_scheduler(obj: Any) -> bool:
    """Return True if an object is a learning rate scheduler, of torch or with the same interface."""
    if isinstance(obj, (AcceleratedScheduler, torch.optim.lr_scheduler.LRScheduler)):
        return True
    # A wrapper of an optimizer, or an engine, has the attributes of a scheduler too.
    if isinstance(obj, (torch.optim.Optimizer, nn.Module)):
        return False
    drives_optimizer = isinstance(getattr(obj, "optimizer", None), torch.optim.Optimizer)
    return drives_optimizer and callable(getattr(obj, "step", None)) and hasattr(obj, "state_dict")

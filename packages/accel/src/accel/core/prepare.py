"""Preparing models, optimizers, schedulers and loaders, and remembering them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from accel_data import DataLoaderConfiguration, prepare_data_loader
from accel_state import RNGType
from accel_state.errors import ConfigurationError

from ..optimizer import AcceleratedOptimizer
from ..scheduler import AcceleratedScheduler
from .compile import compile_model, compile_regions
from .config_resolution import Setup
from .unwrap import extract_model_from_parallel


class Preparation:
    """What an Accelerator has prepared, and how it does so.

    Args:
        setup: strategy, precision and settings.
        loaders: settings of the loaders.
        device_placement: whether models and batches are moved to the device.
        step_scheduler_with_optimizer: whether schedulers advance with their optimizers.
        rng_types: the generators that loaders synchronise.
    """

    def __init__(
        self,
        setup: Setup,
        loaders: DataLoaderConfiguration,
        device_placement: bool,
        step_scheduler_with_optimizer: bool,
        rng_types: list[RNGType],
    ) -> None:
        self.setup = setup
        self.loader_settings = loaders
        self.device_placement = device_placement
        self.step_scheduler_with_optimizer = step_scheduler_with_optimizer
        self.rng_types = rng_types
        self.models: list[nn.Module] = []
        self.optimizers: list[AcceleratedOptimizer] = []
        self.schedulers: list[AcceleratedScheduler] = []
        self.dataloaders: list[Any] = []

    def prepare(self, objects: tuple[Any, ...], device_placement: list[bool | None]) -> list[Any]:
        """Prepare objects of any kind, in any order; what is of no known kind passes through."""
        joined = self.setup.precision.join_optimizer(list(objects))
        joined = self.setup.strategy.prepare_together(joined, self)
        # Schedulers come last: they belong to prepared optimizers.
        prepared = [self._prepare_first(obj, place) for obj, place in zip(joined, device_placement, strict=True)]
        return [self.scheduler(obj) if is_scheduler(obj) else obj for obj in prepared]

    def _prepare_first(self, obj: Any, device_placement: bool | None) -> Any:
        for accepts, method in self._kinds():
            if accepts(obj):
                return method(obj, device_placement)
        return obj

    def _kinds(self) -> list[tuple[Callable[[Any], bool], Callable[..., Any]]]:
        return [
            (lambda obj: isinstance(obj, DataLoader), self.data_loader),
            (lambda obj: isinstance(obj, nn.Module), self.model),
            (lambda obj: isinstance(obj, torch.optim.Optimizer), self.optimizer),
        ]

    def model(self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False) -> nn.Module:
        """Prepare a model: precision, device, wrapping, compilation."""
        if any(model is known for known in self.models):
            return model
        strategy, dynamo = self.setup.strategy, self.setup.dynamo
        if strategy.uses_engine:
            prepared: nn.Module = strategy.prepare_together([model], self)[0]
            return prepared
        strategy.check_model(model)
        spread = is_spread(model)
        if spread and not evaluation_mode:
            self._refuse_spread(model)
        self.setup.precision.wrap_forward(extract_model_from_parallel(model))
        if (self.device_placement if device_placement is None else device_placement) and not spread:
            model = strategy.place(model)
        if not evaluation_mode:
            model = strategy.wrap(model)
            for optimizer in self.optimizers:
                strategy.remap_optimizer(optimizer.optimizer)
        if dynamo.compiles:
            model = (compile_regions if dynamo.use_regional_compilation else compile_model)(model, **dynamo.to_kwargs())
        self.models.append(model)
        return model

    def _refuse_spread(self, model: nn.Module) -> None:
        if self.setup.process.num_processes > 1:
            raise ConfigurationError(
                f"{type(model).__name__} was dispatched over several devices or offloaded (hf_device_map), and each "
                "of the "
                f"{self.setup.process.num_processes} processes would train a copy of it. Start one process, or load "
                "the model without "
                "a device map; for inference prepare it with evaluation_mode=True."
            )

    def optimizer(self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None) -> AcceleratedOptimizer:
        """Prepare an optimizer."""
        if isinstance(optimizer, AcceleratedOptimizer):
            return optimizer
        place = self.device_placement if device_placement is None else device_placement
        self.setup.strategy.remap_optimizer(optimizer)
        prepared = AcceleratedOptimizer(optimizer, device_placement=place, scaler=self.setup.precision.scaler)
        self.setup.precision.watch(optimizer)
        self.optimizers.append(prepared)
        return prepared

    def scheduler(self, scheduler: Any) -> AcceleratedScheduler:
        """Prepare a scheduler, together with the prepared optimizer that it drives."""
        if isinstance(scheduler, AcceleratedScheduler):
            return scheduler
        own = getattr(scheduler, "optimizer", None)
        driven = [prepared for prepared in self.optimizers if prepared.wraps(own)]
        prepared = AcceleratedScheduler(
            scheduler,
            driven or self.optimizers,
            step_with_optimizer=self.step_scheduler_with_optimizer,
            split_batches=self.loader_settings.split_batches,
            num_processes=self.setup.strategy.data_collectives.world_size,
        )
        self.schedulers.append(prepared)
        return prepared

    def data_loader(
        self,
        data_loader: DataLoader[Any],
        device_placement: bool | None = None,
        slice_fn_for_dispatch: Callable[..., Any] | None = None,
    ) -> Any:
        """Prepare a loader: its share of the data, and its device."""
        if any(data_loader is known for known in self.dataloaders):
            return data_loader
        process = self.setup.process
        prepared = prepare_data_loader(
            data_loader,
            process.device,
            num_processes=process.num_processes,
            process_index=process.process_index,
            torch_device_mesh=self.setup.strategy.data_mesh,
            put_on_device=self.device_placement if device_placement is None else device_placement,
            rng_types=list(self.rng_types),
            slice_fn_for_dispatch=slice_fn_for_dispatch,
            **asdict(self.loader_settings),
        )
        self.dataloaders.append(prepared)
        return prepared

    def forget(self) -> None:
        """Drop every reference to prepared objects."""
        for prepared in (self.models, self.optimizers, self.schedulers, self.dataloaders):
            prepared.clear()


def is_spread(model: nn.Module) -> bool:
    """Whether a dispatch has given the model's parts their devices, or offloaded them: it must not be moved as a whole."""
    places = {str(place) for place in getattr(model, "hf_device_map", {}).values()}
    return len(places) > 1 or bool(places & {"disk"}) or any(_is_offloading(module) for module in model.modules())


def _is_offloading(module: nn.Module) -> bool:
    hook = getattr(module, "_hf_hook", None)
    return any(getattr(one, "offload", False) is True for one in getattr(hook, "hooks", (hook,)))


def is_scheduler(obj: Any) -> bool:
    """Whether an object is a learning rate scheduler, of torch or of the same form."""
    if isinstance(obj, (AcceleratedScheduler, torch.optim.lr_scheduler.LRScheduler)):
        return True
    if isinstance(
        obj, (torch.optim.Optimizer, nn.Module)
    ):  # a wrapper around an optimizer, or an engine, has all that is asked for below
        return False
    # Schedulers of other libraries are recognised by what they drive and do.
    driven = getattr(obj, "optimizer", None)
    return (
        isinstance(driven, torch.optim.Optimizer)
        and callable(getattr(obj, "step", None))
        and hasattr(obj, "state_dict")
    )

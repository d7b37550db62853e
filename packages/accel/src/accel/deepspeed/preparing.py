"""Making engines of what was passed to ``prepare``, in any order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from accel_state import PartialState
from accel_state.errors import ConfigurationError
from accel_state.operations import recursively_apply

from ..core.compile import compile_model, compile_regions
from ..optimizer import AcceleratedOptimizer
from ..scheduler import AcceleratedScheduler
from . import nested
from .dummies import DummyOptim, DummyScheduler
from .facts import PreparedFacts
from .library import announcing_builds, is_engine
from .optimizer import check_ownership, for_engine, groups_of, parameters_of, warn_once
from .wrappers import DeepSpeedEngineWrapper, DeepSpeedOptimizerWrapper, DeepSpeedSchedulerWrapper

if TYPE_CHECKING:
    from ..core.prepare import Preparation

_NEEDS_A_GPU = ("zero_quantized_weights", "zero_quantized_gradients", "zero_quantized_nontrainable_weights")


@dataclass
class Group:
    """A model with what trains it.

    Attributes:
        model: the model.
        optimizer: of the script, or its stand-in; None for a model that is not trained.
        scheduler: likewise.
    """

    model: nn.Module
    optimizer: Optimizer | DummyOptim | None = None
    scheduler: Any = None


def is_new_optimizer(obj: object) -> bool:
    """Whether an object is an optimizer, or stands in for one, that was not prepared yet."""
    return isinstance(obj, (Optimizer, DummyOptim)) and not isinstance(obj, AcceleratedOptimizer)


def grouped(objects: Sequence[Any], known: Sequence[Any]) -> list[Group]:
    """The models that are to become engines, each with its optimizer and scheduler.

    Args:
        objects: what was passed to ``prepare``.
        known: the models that are prepared already.

    Raises:
        ConfigurationError: an optimizer without its model, a model with two of them, or an optimizer of two models.
    """
    groups = [Group(obj) for obj in objects if isinstance(obj, nn.Module) and not any(obj is one for one in known)]
    for optimizer in filter(is_new_optimizer, objects):
        group = _owner(optimizer, groups)
        if group.optimizer is not None:
            raise ConfigurationError(
                f"{type(group.model).__name__} was passed to prepare with two optimizers. A DeepSpeed engine has one: put the parameters "
                "into groups of one optimizer."
            )
        check_ownership(group.model, optimizer)
        group.optimizer = optimizer
    for scheduler in (obj for obj in objects if isinstance(obj, DummyScheduler)):
        owners = [group for group in groups if group.optimizer is not None and group.optimizer is scheduler.optimizer]
        if not owners:
            raise ConfigurationError(
                "a DummyScheduler was passed to prepare without the optimizer that it schedules. Pass model, optimizer and scheduler in "
                "one call: accelerator.prepare(model, optimizer, scheduler, loader)."
            )
        owners[0].scheduler = scheduler
    return groups


def _owner(optimizer: Optimizer | DummyOptim, groups: Sequence[Group]) -> Group:
    own = {id(parameter) for parameter in parameters_of(optimizer)}
    for group in groups:
        if any(id(parameter) in own for parameter in group.model.parameters()):
            return group
    raise ConfigurationError(
        f"{type(optimizer).__name__} was passed to prepare without the model that it updates. DeepSpeed makes one engine of both: pass "
        "them in one call, in any order: accelerator.prepare(model, optimizer, loader)."
    )


@dataclass(frozen=True)
class Maker:
    """Makes engines.

    Attributes:
        library: the deepspeed package.
        plugin: the settings in force.
        state: rank, world and device.
        mixed_precision: of the Accelerator.
        preparation: what is prepared already, and the Accelerator's settings.
    """

    library: Any
    plugin: Any
    state: PartialState
    mixed_precision: str
    preparation: Preparation

    def facts(self, group: Group, objects: Sequence[Any]) -> PreparedFacts:
        """What the rest of the configuration follows from."""
        loaders = [obj for obj in objects if isinstance(obj, DataLoader)]
        known = [size for size in map(self._micro_batch, self.preparation.dataloaders) if size is not None]
        return PreparedFacts(
            world_size=self.state.num_processes,
            mixed_precision=self.mixed_precision,
            micro_batch_sizes=tuple(map(self._micro_batch, loaders)),
            known_micro_batch_size=min(known) if known else None,
            gradient_accumulation_steps=self.preparation.setup.accumulation_plugin.num_steps or 1,
            model=group.model,
            optimizer=group.optimizer,
            scheduler=group.scheduler or _torch_scheduler_of(group, objects),
            scheduler_steps_per_step=self._steps_a_call,
        )

    def _micro_batch(self, loader: Any) -> int | None:
        """Samples that one process gets in a batch; None if the loader does not say."""
        if any(loader is prepared for prepared in self.preparation.dataloaders):
            try:
                return int(loader.total_batch_size) // self.state.num_processes
            except (ConfigurationError, AttributeError, TypeError):
                return None
        size = loader.batch_size if loader.batch_size is not None else getattr(loader.batch_sampler, "batch_size", None)
        if size is None:
            return None
        return int(size) // self.state.num_processes if self.preparation.loader_settings.split_batches else int(size)

    @property
    def _steps_a_call(self) -> int:
        preparation = self.preparation
        once = preparation.loader_settings.split_batches or not preparation.step_scheduler_with_optimizer
        return 1 if once else self.state.num_processes

    def make(self, group: Group, objects: Sequence[Any]) -> tuple[Any, DeepSpeedOptimizerWrapper | None, AcceleratedScheduler | None]:
        """One engine, its prepared optimizer, and the prepared form of its DummyScheduler."""
        config = self.plugin.resolve(self.facts(group, objects))
        self._check_device(config)
        stage = int(nested.get(config, "zero_optimization.stage", 0))
        if stage < 3 and nested.get(config, "zero_optimization.offload_optimizer.device") == "nvme":
            warn_once(
                f"offload_optimizer_device='nvme' at ZeRO stage {stage}: DeepSpeed keeps the optimizer's states in host memory, as with "
                "'cpu'. It writes them to a drive at stage 3 only."
            )
        if stage == 3:
            self.plugin.set_moe_leaf_modules(group.model)
        self._compile(group.model)
        arguments = self._arguments(group, config, stage)
        with announcing_builds():
            engine, *_ = self.library.initialize(model=group.model, dist_init_required=False, **arguments)
        if engine.bfloat16_enabled():
            # In fp16 DeepSpeed does so itself ("auto_cast").
            engine.module.register_forward_pre_hook(_to_bfloat16, with_kwargs=True)
        if group.optimizer is None:
            return engine, None, None
        wrapper = DeepSpeedEngineWrapper(engine)
        optimizer = DeepSpeedOptimizerWrapper(engine.optimizer, wrapper, group.optimizer)
        return engine, optimizer, self._scheduler(group, engine, optimizer)

    def _check_device(self, config: dict[str, Any]) -> None:
        names = [f"zero_optimization.{name}" for name in _NEEDS_A_GPU if nested.get(config, f"zero_optimization.{name}")]
        if names and self.state.device.type == "cpu":
            raise ConfigurationError(
                f"{', '.join(names)}: DeepSpeed has no operators for this part of ZeRO++ on CPUs. Leave it out here; "
                "zero_hpz_partition_size works on CPUs too."
            )

    def _arguments(self, group: Group, config: dict[str, Any], stage: int) -> dict[str, Any]:
        if group.optimizer is None:
            # Without an optimizer, only stage 3 has something to divide.
            return {"config": config if stage == 3 else {**config, "zero_optimization": {"stage": 0}}}
        if isinstance(group.optimizer, DummyOptim):
            return {"config": config, "model_parameters": groups_of(group.optimizer)}
        config.setdefault("zero_allow_untested_optimizer", True)
        return {"config": config, "optimizer": for_engine(group.optimizer, config)}

    def _scheduler(self, group: Group, engine: Any, optimizer: DeepSpeedOptimizerWrapper) -> AcceleratedScheduler | None:
        if group.scheduler is None:
            return None
        make = group.scheduler.lr_scheduler_callable
        if make is None:
            return DeepSpeedSchedulerWrapper(engine.lr_scheduler, optimizer)
        preparation = self.preparation
        return AcceleratedScheduler(
            make(engine.basic_optimizer),
            optimizer,
            step_with_optimizer=preparation.step_scheduler_with_optimizer,
            split_batches=preparation.loader_settings.split_batches,
        )

    def _compile(self, model: nn.Module) -> None:
        dynamo = self.preparation.setup.dynamo
        if dynamo.compiles:
            (compile_regions if dynamo.use_regional_compilation else compile_model)(model, **dynamo.to_kwargs())


def _to_bfloat16(_: nn.Module, positional: Any, named: Any) -> tuple[Any, Any]:
    """The inputs of a model whose weights are bfloat16, so that a script need not cast what its loader gives."""
    cast: tuple[Any, Any] = recursively_apply(torch.Tensor.bfloat16, (positional, named), test_type=_is_floating)
    return cast


def _is_floating(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _torch_scheduler_of(group: Group, objects: Sequence[Any]) -> Any:
    from ..core.prepare import is_scheduler

    found = (obj for obj in objects if is_scheduler(obj) and not isinstance(obj, (DummyScheduler, AcceleratedScheduler)))
    return next((obj for obj in found if obj.optimizer is group.optimizer), None)


def make_engines(maker: Maker, objects: Sequence[Any]) -> list[Any]:
    """The objects, with engines in place of models, and what belongs to them in place of optimizers and DummySchedulers.

    The new ones are noted as prepared; loaders and torch's schedulers are left for the caller to prepare.
    """
    result, preparation = list(objects), maker.preparation
    for group in grouped(objects, preparation.models):
        if is_engine(group.model):
            preparation.models.append(group.model)
            continue
        engine, optimizer, scheduler = maker.make(group, objects)
        preparation.models.append(engine)
        replacements: list[tuple[Any, Any]] = [(group.model, engine)]
        if optimizer is not None:
            preparation.optimizers.append(optimizer)
            replacements.append((group.optimizer, optimizer))
        if scheduler is not None:
            preparation.schedulers.append(scheduler)
            replacements.append((group.scheduler, scheduler))
        for given, made in replacements:
            result = [made if obj is given else obj for obj in result]
    return result

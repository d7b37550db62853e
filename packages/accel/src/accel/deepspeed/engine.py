"""Which engines a loss depends on, where several are trained."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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
from . import config_paths, gradients
from .config import PreparedFacts
from .optimizer import DummyOptim, DummyScheduler, check_ownership, for_engine, groups_of, parameters_of, warn_once
from .runtime import announcing_builds, is_engine

if TYPE_CHECKING:
    from ..core.prepare import Preparation


def reached(loss: torch.Tensor, wrappers: Sequence[Any]) -> list[Any]:
    """The engines, in their order, of which some parameter's gradient is computed by ``loss.backward()``."""
    owner = {
        id(parameter): index
        for index, wrapper in enumerate(wrappers)
        for parameter in wrapper.engine.module.parameters()
    }
    found: set[int] = set()
    seen: set[Any] = set()
    pending = [loss.grad_fn]
    while pending and len(found) < len(wrappers):
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None and id(variable) in owner:
            found.add(owner[id(variable)])
        pending.extend(following for following, _ in node.next_functions)
    return [wrappers[index] for index in sorted(found)]


class DeepSpeedEngineWrapper:
    """One engine: when it reduces gradients, and when it steps.

    Args:
        engine: what ``deepspeed.initialize`` returned.
    """

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.configured_clipping = float(engine.gradient_clipping() or 0.0)
        self.no_sync_depth = 0
        self._has_gradients = False
        self._norm: float | None = None

    def set_boundary(self, is_boundary: bool | None) -> bool:
        """Say whether the next backward pass ends an accumulation window; None leaves it to the engine, which counts
        its own steps.

        Returns:
            Whether it does.
        """
        self.engine.set_gradient_accumulation_boundary(False if self.no_sync_depth else is_boundary)
        return bool(self.engine.is_gradient_accumulation_boundary())

    def backward(self, loss: torch.Tensor, sync_gradients: bool = True, **kwargs: Any) -> None:
        """Compute gradients, from a loss that is weighed for accumulation already.

        Args:
            loss: the loss, a scalar.
            sync_gradients: whether this backward pass ends an accumulation window.
            **kwargs: ``retain_graph``.
        """
        self.set_boundary(sync_gradients)
        self.run_backward(loss, **kwargs)

    def run_backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Compute gradients, with the boundary as it was set.

        Raises:
            ConfigurationError: an argument that the engine does not know.
        """
        unknown = sorted(set(kwargs) - {"retain_graph"})
        if unknown:
            raise ConfigurationError(
                f"backward got {', '.join(unknown)}, which DeepSpeed's engine does not know. It takes retain_graph."
            )
        self.engine.backward(loss, scale_wrt_gas=False, **kwargs)
        self._has_gradients = True

    @contextmanager
    def taking_part(self) -> Iterator[None]:
        """A block in which another engine runs a backward pass that computes this one's gradients too.

        By itself this engine would count each of its forward passes as a backward pass of its own. So it is told what
        its own ``backward`` tells it: that one is running, and, at the end, that it is over.

        Raises:
            ConfigurationError: this version of DeepSpeed computes gradients for one engine at a time.
        """
        engine = self.engine
        if not hasattr(engine, "_running_engine_backward_count"):
            raise ConfigurationError(
                "the loss depends on several models that are trained, and this version of DeepSpeed computes "
                "gradients for one engine at a "
                "time. Upgrade: pip install 'deepspeed>=0.19'."
            )
        self._count_backward(1)
        try:
            yield
            engine._backward_epilogue()
        finally:
            self._count_backward(-1)
        self._has_gradients = True

    def _count_backward(self, change: int) -> None:
        engine = self.engine
        with engine._running_engine_backward_lock:
            engine._running_engine_backward_count += change
            engine._running_engine_backward = engine._running_engine_backward_count > 0

    def step(self) -> bool | None:
        """Update the weights if a window has ended.

        Returns:
            Whether they were updated; None if no window has ended, and False if gradients had overflowed.
        """
        if not self._has_gradients:
            return None
        ends_window = bool(self.engine.is_gradient_accumulation_boundary())
        self.engine.step()
        if not ends_window:
            return None
        self._has_gradients = False
        self._norm = None
        gradients.set_clipping(self.engine, self.configured_clipping)
        return bool(self.engine.was_step_applied())

    def discard_gradients(self) -> None:
        """Forget the gradients of the current window; nothing once they have been used."""
        if not self._has_gradients:
            return
        for tensor in gradients.held(self.engine):
            tensor.zero_()
        self.engine.optimizer.zero_grad()
        self._has_gradients = False
        self._norm = None

    @property
    def has_whole_window(self) -> bool:
        """Whether gradients of a window that has ended wait for the step."""
        return self._has_gradients and bool(self.engine.is_gradient_accumulation_boundary())

    def measure(self) -> float | None:
        """The global norm of the gradients that wait for the step; None if there are none. Every rank must call it."""
        if not self.has_whole_window:
            return None
        if self._norm is None:
            found = gradients.norm(self.engine)
            self._norm = None if found is None else float(found)
        return self._norm

    def get_global_grad_norm(self) -> float | None:
        """The global norm of the gradients that wait for the step, or else of the last step; None before the first."""
        found = self.measure()
        if found is None:
            found = self.engine.get_global_grad_norm()
        return None if found is None else float(found)


class DeepSpeedOptimizerWrapper(AcceleratedOptimizer):
    """The optimizer of an engine.

    ``step`` has the engine step, which clips gradients, updates weights, and clears the gradients.

    Args:
        optimizer: the engine's optimizer.
        wrapper: the engine; None for an optimizer that another part of the script steps.
        given: what the script passed to ``prepare``.
    """

    def __init__(self, optimizer: Any, wrapper: DeepSpeedEngineWrapper | None = None, given: Any = None) -> None:
        super().__init__(optimizer, device_placement=False, scaler=None)
        self.engine_wrapper = wrapper
        self.given = given

    @property
    def defaults(self) -> dict[str, Any]:
        """The default settings of the optimizer inside."""
        return self._innermost.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self._innermost.defaults = defaults

    @property
    def _innermost(self) -> Optimizer:
        inner = self.optimizer
        while not isinstance(inner, Optimizer) and hasattr(inner, "optimizer"):
            inner = inner.optimizer
        return inner

    def wraps(self, optimizer: Any) -> bool:
        """Whether this is the prepared form of an optimizer."""
        return super().wraps(optimizer) or optimizer is self.given or optimizer is self._innermost

    def share_groups(self) -> None:
        """Have the script's optimizer, whose schedulers set its learning rates, share the parameter groups of the one
        in the engine.

        They are two where DeepSpeed has a form of its own, and loading a state makes new groups.
        """
        if isinstance(self.given, Optimizer):
            self.given.param_groups = self._innermost.param_groups

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: the engine has divided the parameters.

        Raises:
            ConfigurationError: always.
        """
        raise ConfigurationError(
            "DeepSpeed divides an optimizer's parameters when it is prepared, so none can be added later. Add the "
            "group before prepare(), "
            "with parameters that are frozen until then if need be."
        )

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters, unless gradients are still being accumulated.

        Raises:
            ConfigurationError: there is a closure, which the engine cannot call.
        """
        if closure is not None:
            raise ConfigurationError(
                "DeepSpeed's engine steps without a closure. Call accelerator.backward(loss), and then step()."
            )
        if self.engine_wrapper is None:
            return None
        applied = self.engine_wrapper.step()
        if applied is not None:
            self._is_overflow = not applied
            self.steps_taken += applied
        return None

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear the gradients of a window that was not stepped with; those of a step the engine has cleared itself."""
        if self.gradient_state.sync_gradients and self.engine_wrapper is not None:
            self.engine_wrapper.discard_gradients()


class DeepSpeedSchedulerWrapper(AcceleratedScheduler):
    """A scheduler of the DeepSpeed configuration, which the engine advances whenever it steps.

    Args:
        scheduler: the engine's scheduler.
        optimizers: the prepared optimizer, or several of them.
    """

    def __init__(self, scheduler: Any, optimizers: AcceleratedOptimizer | Sequence[AcceleratedOptimizer]) -> None:
        super().__init__(scheduler, optimizers, step_with_optimizer=True, split_batches=True)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: the engine has advanced it."""


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
                f"{type(group.model).__name__} was passed to prepare with two optimizers. A DeepSpeed engine has one: "
                "put the parameters "
                "into groups of one optimizer."
            )
        check_ownership(group.model, optimizer)
        group.optimizer = optimizer
    for scheduler in (obj for obj in objects if isinstance(obj, DummyScheduler)):
        owners = [group for group in groups if group.optimizer is not None and group.optimizer is scheduler.optimizer]
        if not owners:
            raise ConfigurationError(
                "a DummyScheduler was passed to prepare without the optimizer that it schedules. Pass model, "
                "optimizer and scheduler in "
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
        f"{type(optimizer).__name__} was passed to prepare without the model that it updates. DeepSpeed makes one "
        "engine of both: pass "
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

    def make(
        self, group: Group, objects: Sequence[Any]
    ) -> tuple[Any, DeepSpeedOptimizerWrapper | None, AcceleratedScheduler | None]:
        """One engine, its prepared optimizer, and the prepared form of its DummyScheduler."""
        config = self.plugin.resolve(self.facts(group, objects))
        self._check_device(config)
        stage = int(config_paths.get(config, "zero_optimization.stage", 0))
        if stage < 3 and config_paths.get(config, "zero_optimization.offload_optimizer.device") == "nvme":
            warn_once(
                f"offload_optimizer_device='nvme' at ZeRO stage {stage}: DeepSpeed keeps the optimizer's states in "
                "host memory, as with "
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
        names = [
            f"zero_optimization.{name}"
            for name in _NEEDS_A_GPU
            if config_paths.get(config, f"zero_optimization.{name}")
        ]
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

    def _scheduler(
        self, group: Group, engine: Any, optimizer: DeepSpeedOptimizerWrapper
    ) -> AcceleratedScheduler | None:
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

    found = (
        obj for obj in objects if is_scheduler(obj) and not isinstance(obj, (DummyScheduler, AcceleratedScheduler))
    )
    return next((obj for obj in found if obj.optimizer is group.optimizer), None)


def make_engines(maker: Maker, objects: Sequence[Any]) -> list[Any]:
    """The objects, with engines in place of models, and what belongs to them in place of optimizers and
    DummySchedulers.

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

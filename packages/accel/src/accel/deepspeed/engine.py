"""Creates DeepSpeed engines from models, optimizers and schedulers, and wraps them for the training loop."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from torch.utils.hooks import RemovableHandle

from accel_state import PartialState
from accel_state.errors import ConfigurationError
from accel_state.operations import recursively_apply

from ..contract.optimizer import AcceleratedOptimizer
from ..contract.scheduler import AcceleratedScheduler
from ..core.compile import compile_model, compile_regions
from ..core.elementwise import refuse_unless_elementwise
from ..core.unwrap import is_compiled_wrapper
from . import gradients, master_weights
from .config import PreparedFacts
from .config_paths import get_value
from .optimizer import (
    DummyOptim,
    DummyScheduler,
    check_ownership,
    groups_of,
    optimizer_for_engine,
    parameters_of,
    warn_once,
)
from .runtime import is_engine, log_operator_builds
from .validation import QUANTIZED_KEYS


class DeepSpeedEngineWrapper:
    """Controls when an engine reduces gradients and steps.

    Args:
        engine: the result of ``deepspeed.initialize``.
    """

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.configured_clipping: float = float(engine.gradient_clipping() or 0.0)
        self.no_sync_depth = 0
        self._has_gradients = False
        self.backward_passes = 0
        self._has_reduced = False  # the last backward pass ended a window
        self._micro_step: int | None = None  # DeepSpeed's number of the last backward pass
        self._checksums: list[int] | None = None  # of the weights after the last step
        self._norm: float | None = None
        # DeepSpeed's own optimizers update whole shards: a frozen parameter would decay, and one that is unfrozen later
        # would have no gradient.
        fixed = () if isinstance(engine.optimizer, Optimizer) else engine.module.named_parameters()
        self._fixed = [(name, parameter, parameter.requires_grad) for name, parameter in fixed]
        self._is_bypassed = False  # whether a script has called loss.backward() itself
        if hasattr(engine, "_backward_prologue"):  # versions without it raise an error of their own then
            engine._backward_prologue = partial(self._begin_backward, engine._backward_prologue)

    def _begin_backward(self, begin: Callable[[], None]) -> None:
        self._is_bypassed = not self.engine._running_engine_backward
        begin()

    def check_trained(self) -> None:
        """Refuse a loss after parameters were frozen or unfrozen, if the engine updates the same ones in each step.

        Raises:
            ConfigurationError: a parameter is trained that was frozen when the engine was created, or the other way.
        """
        for name, parameter, trained in self._fixed:
            if parameter.requires_grad != trained:
                before, now = ("trainable", "frozen") if trained else ("frozen", "trainable")
                raise ConfigurationError(
                    f"{name} was {before} when its {type(self.engine.module).__name__} was prepared and is {now} now. "
                    f"DeepSpeed at ZeRO stage {int(self.engine.zero_optimization_stage())} updates the same parameters "
                    "in every step. Freeze and unfreeze before prepare(), or use DDP or FSDP 2."
                )

    def check_accumulates(self) -> None:
        """Refuse a backward pass whose gradients would take the place of those of the last one.

        Stages 1 and 2 add gradients within a window only. Stage 3 begins to add them in the next forward.

        Raises:
            ConfigurationError: there was a backward pass without a step, and DeepSpeed would drop its gradients.
        """
        stage, before = int(self.engine.zero_optimization_stage()), self._micro_step
        self._micro_step = getattr(self.engine.optimizer, "micro_step_id", None)
        if not self._has_gradients or not master_weights.shards_gradients(self.engine):
            return
        if self._micro_step == before if stage == 3 else self._has_reduced:
            instead = (
                "compute each loss after the backward pass of the one before"
                if stage == 3
                else "enter `with accelerator.no_sync(model):` for all passes but the last, or set "
                "gradient_accumulation_steps and use `with accelerator.accumulate(model):`"
            )
            raise ConfigurationError(
                f"backward was called again before a step, and DeepSpeed at ZeRO stage {stage} would drop the "
                f"gradients of the first call. Add the losses and call backward once, or {instead}."
            )

    def set_boundary(self, is_boundary: bool | None) -> bool:
        """Set whether the next backward pass ends an accumulation window; None lets the engine count micro batches."""
        self.engine.set_gradient_accumulation_boundary(False if self.no_sync_depth else is_boundary)
        return bool(self.engine.is_gradient_accumulation_boundary())

    def backward(self, loss: torch.Tensor, sync_gradients: bool = True, **kwargs: Any) -> None:
        """Compute gradients."""
        self.set_boundary(sync_gradients)
        self.run_backward(loss, **kwargs)

    def run_backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Compute gradients, with the boundary of the last :meth:`set_boundary`."""
        unknown = sorted(set(kwargs) - {"retain_graph"})
        if unknown:
            raise ConfigurationError(
                f"backward got {', '.join(unknown)}, which DeepSpeed does not support. It takes retain_graph and "
                "scale_wrt_gas."
            )
        self.check_trained()
        self.check_accumulates()
        self.engine.backward(loss, scale_wrt_gas=False, **kwargs)
        self._note_backward()

    @contextmanager
    def joint_backward(self) -> Iterator[None]:
        """Let the backward pass of another engine compute this one's gradients too."""
        engine = self.engine
        if not hasattr(engine, "_running_engine_backward_count"):
            raise ConfigurationError(
                "the loss depends on several trained models, but this version of DeepSpeed computes gradients for one "
                "engine at a time. Upgrade: pip install 'deepspeed>=0.19'."
            )
        self.check_trained()
        self.check_accumulates()
        self._count_backward(1)
        try:
            yield
            engine._backward_epilogue()
        finally:
            self._count_backward(-1)
        self._note_backward()

    @property
    def has_gradients(self) -> bool:
        """True if there was a backward pass since the last step, or since gradients were discarded."""
        return self._has_gradients

    def _note_backward(self) -> None:
        self._has_gradients, self._norm = True, None
        self.backward_passes += 1
        self._has_reduced = bool(self.engine.is_gradient_accumulation_boundary())

    def _count_backward(self, change: int) -> None:
        engine = self.engine
        with engine._running_engine_backward_lock:
            engine._running_engine_backward_count += change
            engine._running_engine_backward = engine._running_engine_backward_count > 0

    def step(self) -> bool | None:
        """Update the weights if an accumulation window has ended."""
        if not self._has_gradients:
            if self._is_bypassed:
                raise ConfigurationError(
                    "DeepSpeed's engine has not seen loss.backward(), so that this step would change nothing. Call "
                    "accelerator.backward(loss) in place of it."
                )
            return None
        ends_window = bool(self.engine.is_gradient_accumulation_boundary())
        if ends_window:
            master_weights.check_unchanged(self.engine, self._checksums)
        with gradients.norm_known(self.engine, self._norm if ends_window else None):
            self.engine.step()
        if not ends_window:
            return None
        self._checksums = master_weights.checksums(self.engine)
        self._has_gradients, self._norm = False, None
        gradients.set_clipping(self.engine, self.configured_clipping)
        return bool(self.engine.was_step_applied())

    def scale_gradients(self, factor: float | torch.Tensor) -> None:
        """Multiply the gradients of the current window, in place."""
        gradients.scale_gradients(self.engine, factor)
        self._norm = None

    def discard_gradients(self) -> None:
        """Discard the gradients of a window that has not been stepped with."""
        if not self._has_gradients:
            return
        for tensor in gradients.gradient_tensors(self.engine):
            tensor.zero_()
        self.engine.optimizer.zero_grad()
        self._has_gradients, self._norm = False, None

    def get_global_grad_norm(self) -> float | None:
        """Return the global gradient norm of a finished window, or else of the last step; None before the first."""
        if self._has_gradients and self.engine.is_gradient_accumulation_boundary() and self._norm is None:
            norm = gradients.gradient_norm(self.engine)
            self._norm = None if norm is None else float(norm)
        if self._norm is not None:
            return self._norm
        last_norm = self.engine.get_global_grad_norm()
        return None if last_norm is None else float(last_norm)


def engines_of_loss(loss: torch.Tensor, wrappers: Sequence[DeepSpeedEngineWrapper]) -> list[DeepSpeedEngineWrapper]:
    """Return the engines that ``loss.backward()`` computes gradients for, in the order of ``wrappers``."""
    owner = {
        id(parameter): index
        for index, wrapper in enumerate(wrappers)
        for parameter in wrapper.engine.module.parameters()
    }
    reached: set[int] = set()
    visited: set[Any] = set()
    pending = [loss.grad_fn]
    while pending and len(reached) < len(wrappers):
        node = pending.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None and id(variable) in owner:
            reached.add(owner[id(variable)])
        pending.extend(next_node for next_node, _ in node.next_functions)
    return [wrappers[index] for index in sorted(reached)]


class DeepSpeedOptimizerWrapper(AcceleratedOptimizer):
    """The optimizer of an engine; its ``step`` clips gradients, updates the weights and clears the gradients.

    Args:
        optimizer: the engine's optimizer.
        wrapper: the engine; None for an optimizer that is stepped elsewhere.
        original: the optimizer or DummyOptim that the script passed to ``prepare``.
    """

    steps_taken: int

    def __init__(self, optimizer: Any, wrapper: DeepSpeedEngineWrapper | None = None, original: Any = None) -> None:
        super().__init__(optimizer, device_placement=False, scaler=None)
        self.engine_wrapper = wrapper
        self.original = original
        self._guard: RemovableHandle | None = None  # until the first step
        if wrapper is not None and isinstance(original, Optimizer):
            engine = weakref.ref(wrapper)
            self._guard = original.register_step_pre_hook(lambda optimizer, *_: _refuse_bypass(optimizer, engine()))

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_guard": None}

    @property
    def defaults(self) -> dict[str, Any]:
        """The default settings of the innermost optimizer."""
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
        """Return True if this is the prepared form of an optimizer."""
        return super().wraps(optimizer) or optimizer is self.original or optimizer is self._innermost

    def share_groups(self) -> None:
        """Share the engine's parameter groups with the script's optimizer, whose schedulers set its learning rates."""
        if isinstance(self.original, Optimizer):
            self.original.param_groups = self._innermost.param_groups

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Not supported: the engine has already sharded the parameters."""
        raise ConfigurationError(
            "DeepSpeed shards an optimizer's parameters when it is prepared, so groups cannot be added later. Add the "
            "group before prepare(), or use DDP or FSDP 2."
        )

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters, unless gradients are still being accumulated."""
        if closure is not None:
            raise ConfigurationError(
                "DeepSpeed's engine steps without a closure. Call accelerator.backward(loss), and then step()."
            )
        self.note_step()
        if self._guard is not None:
            self._guard.remove()
            self._guard = None
        for average in self.averages:
            average.before_step(self)
        applied = self.engine_wrapper.step() if self.engine_wrapper is not None else None
        if applied is not None:
            self._is_overflow = not applied
            self.steps_taken += applied
        return None

    def gradients_seen(self) -> tuple[Any, ...]:
        """See the base class: the engine keeps the gradients itself."""
        return () if self.engine_wrapper is None else (self.engine_wrapper.backward_passes,)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Discard the gradients of a window that was not stepped with; after a step the engine has cleared them."""
        if self.engine_wrapper is not None and not self.must_keep_gradients():
            self.engine_wrapper.discard_gradients()


def _refuse_bypass(optimizer: Optimizer, wrapper: DeepSpeedEngineWrapper | None) -> None:
    """Refuse a step of the script's optimizer by itself, which has none of the gradients of the engine."""
    if wrapper is not None and wrapper.has_gradients:
        raise ConfigurationError(
            f"{type(optimizer).__name__}.step() was called on the optimizer that was passed to prepare(), and "
            "DeepSpeed's engine keeps the gradients. Call step() of the optimizer that prepare() returned."
        )


class DeepSpeedSchedulerWrapper(AcceleratedScheduler):
    """A scheduler of the DeepSpeed configuration, which the engine advances at each step.

    Args:
        scheduler: the engine's scheduler.
        optimizers: the prepared optimizer, or several of them.
    """

    def __init__(self, scheduler: Any, optimizers: AcceleratedOptimizer | Sequence[AcceleratedOptimizer]) -> None:
        super().__init__(scheduler, optimizers, step_with_optimizer=True, split_batches=True)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the engine has advanced the scheduler."""


@dataclass
class ModelGroup:
    """A model, and the optimizer and scheduler (or their placeholders) that train it, if any."""

    model: nn.Module
    optimizer: Optimizer | DummyOptim | None = None
    scheduler: Any = None


def group_models(objects: Sequence[Any], prepared: Sequence[Any]) -> list[ModelGroup]:
    """Match each model that becomes an engine with its optimizer and its DummyScheduler."""
    is_prepared = set(map(id, prepared))
    groups = [ModelGroup(obj) for obj in objects if isinstance(obj, nn.Module) and id(obj) not in is_prepared]
    for optimizer in objects:
        if not isinstance(optimizer, (Optimizer, DummyOptim)) or isinstance(optimizer, AcceleratedOptimizer):
            continue
        ids = set(map(id, parameters_of(optimizer)))
        group = next((group for group in groups if any(id(item) in ids for item in group.model.parameters())), None)
        if group is None:
            raise missing_model_error(optimizer)
        if group.optimizer is not None:
            raise ConfigurationError(
                f"{type(group.model).__name__} was passed to prepare with two optimizers. A DeepSpeed engine has one: "
                "use parameter groups of a single optimizer."
            )
        check_ownership(group.model, optimizer)
        group.optimizer = optimizer
    for scheduler in (obj for obj in objects if isinstance(obj, DummyScheduler)):
        owners = [group for group in groups if group.optimizer is not None and group.optimizer is scheduler.optimizer]
        if not owners:
            raise ConfigurationError(
                "a DummyScheduler was passed to prepare without its optimizer. Pass model, optimizer and scheduler in "
                "one call: accelerator.prepare(model, optimizer, scheduler, loader)."
            )
        owners[0].scheduler = scheduler
    return groups


def missing_model_error(optimizer: Any) -> ConfigurationError:
    """Return the error for an optimizer that is prepared without its model."""
    return ConfigurationError(
        f"{type(optimizer).__name__} was passed to prepare without the model that it updates. DeepSpeed creates one "
        "engine from both: pass them in one call, in any order: accelerator.prepare(model, optimizer, loader)."
    )


@dataclass(frozen=True)
class EngineBuilder:
    """Creates engines."""

    library: Any  # the deepspeed package
    plugin: Any  # the selected DeepSpeedPlugin
    state: PartialState  # rank, world and device
    mixed_precision: str  # the Accelerator's precision
    preparation: Any  # the :class:`accel.setup.prepare.Preparation`: prepared objects, and the Accelerator's settings

    def prepare(self, objects: Sequence[Any]) -> list[Any]:
        """Replace models by engines, and their optimizers and DummySchedulers by the prepared ones."""
        preparation = self.preparation
        replacements: dict[int, Any] = {}
        for group in group_models(objects, preparation.models):
            if is_engine(group.model):
                preparation.models.append(group.model)
                continue
            engine, optimizer, scheduler = self._build(group, objects)
            preparation.models.append(engine)
            replacements[id(group.model)] = engine
            if optimizer is not None:
                optimizer.averages = preparation.averages
                optimizer.strategy = preparation.strategy
                optimizer.accumulation = preparation.accumulation
                preparation.optimizers.append(optimizer)
                replacements[id(group.optimizer)] = optimizer
            if scheduler is not None:
                preparation.schedulers.append(scheduler)
                replacements[id(group.scheduler)] = scheduler
        return [replacements.get(id(obj), obj) for obj in objects]

    def _build(
        self, group: ModelGroup, objects: Sequence[Any]
    ) -> tuple[Any, DeepSpeedOptimizerWrapper | None, AcceleratedScheduler | None]:
        config = self.plugin.resolve(self._facts(group, objects))
        quantized = [path for key in QUANTIZED_KEYS if get_value(config, path := f"zero_optimization.{key}")]
        if quantized and self.state.device.type == "cpu":
            raise ConfigurationError(
                f"{', '.join(quantized)}: DeepSpeed has no CPU operators for this part of ZeRO++. Remove it; "
                "zero_hpz_partition_size works on CPUs."
            )
        stage = int(get_value(config, "zero_optimization.stage", 0))
        if stage < 3 and get_value(config, "zero_optimization.offload_optimizer.device") == "nvme":
            warn_once(
                f"offload_optimizer_device='nvme' at ZeRO stage {stage}: DeepSpeed keeps the optimizer states in host "
                "memory, as with 'cpu'. It uses a drive at stage 3 only."
            )
        if stage == 3 and not get_value(config, "zero_optimization.stage3_gather_16bit_weights_on_model_save"):
            warn_once(
                "ZeRO stage 3 without zero3_save_16bit_model: save_model and get_state_dict will raise, because no "
                "rank has the full weights. To use them at the end of the training, set "
                "DeepSpeedPlugin(zero3_save_16bit_model=True) or --zero3_save_16bit_model true. save_state works "
                "without it."
            )
        if stage == 0 and group.optimizer is not None and get_value(config, "bf16.enabled"):
            raise ConfigurationError(
                "ZeRO stage 0 in bf16 differs from one process: by 0.04 in the loss after four steps, where "
                "the other stages keep within 0.03 of bf16 autocast after many. Set zero_stage=1, which shards the "
                "optimizer state alone, or train with DDP."
            )
        if stage > 0 and isinstance(group.optimizer, Optimizer):
            refuse_unless_elementwise(group.optimizer, f"ZeRO stage {stage}", "fsdp_version=2 or DDP")
        if stage == 3 and is_compiled_wrapper(group.model):
            raise ConfigurationError(
                "ZeRO stage 3 gathers the parameters of the model's own modules, and cannot do so inside the wrapper "
                "of torch.compile. Prepare the model itself; TorchDynamoPlugin compiles it afterwards."
            )
        if stage == 3:
            self.plugin.set_moe_leaf_modules(group.model)
        dynamo = self.preparation.dynamo
        if dynamo is not None:
            compile_function = compile_regions if dynamo.use_regional_compilation else compile_model
            compile_function(group.model, **dynamo.to_kwargs())
        arguments = self._arguments(group, config, stage)
        with log_operator_builds():
            engine, *_ = self.library.initialize(model=group.model, dist_init_required=False, **arguments)
        if engine.bfloat16_enabled():
            _check_batch_norms(engine.module, self.state.device)
            # In fp16 DeepSpeed casts the inputs itself ("auto_cast").
            engine.module.register_forward_pre_hook(_cast_inputs_to_bfloat16, with_kwargs=True)
        if group.optimizer is None:
            return engine, None, None
        optimizer = DeepSpeedOptimizerWrapper(engine.optimizer, DeepSpeedEngineWrapper(engine), group.optimizer)
        if group.scheduler is None:
            return engine, optimizer, None
        create = group.scheduler.lr_scheduler_callable
        if create is None:
            return engine, optimizer, DeepSpeedSchedulerWrapper(engine.lr_scheduler, optimizer)
        scheduler = AcceleratedScheduler(
            create(engine.basic_optimizer),
            optimizer,
            step_with_optimizer=self.preparation.step_scheduler_with_optimizer,
            split_batches=self.preparation.loader_settings.split_batches,
        )
        return engine, optimizer, scheduler

    def _facts(self, group: ModelGroup, objects: Sequence[Any]) -> PreparedFacts:
        preparation = self.preparation
        known = [size for size in map(self._micro_batch, preparation.dataloaders) if size is not None]
        scheduler = group.scheduler
        if scheduler is None and group.optimizer is not None:
            others = [obj for obj in objects if not isinstance(obj, (nn.Module, Optimizer, AcceleratedScheduler))]
            scheduler = next((obj for obj in others if getattr(obj, "optimizer", None) is group.optimizer), None)
        steps_once = preparation.loader_settings.split_batches or not preparation.step_scheduler_with_optimizer
        return PreparedFacts(
            world_size=self.state.num_processes,
            mixed_precision=self.mixed_precision,
            micro_batch_sizes=tuple(self._micro_batch(obj) for obj in objects if isinstance(obj, DataLoader)),
            known_micro_batch_size=min(known, default=None),
            gradient_accumulation_steps=preparation.accumulation_plugin.num_steps or 1,
            model=group.model,
            optimizer=group.optimizer,
            scheduler=scheduler,
            scheduler_steps_per_step=1 if steps_once else self.state.num_processes,
        )

    def _micro_batch(self, loader: Any) -> int | None:
        """Return the samples per process and batch; None if the loader does not say."""
        processes = self.state.num_processes
        if any(loader is prepared for prepared in self.preparation.dataloaders):
            try:
                return int(loader.total_batch_size) // processes
            except (ConfigurationError, AttributeError, TypeError):
                return None
        size = loader.batch_size if loader.batch_size is not None else getattr(loader.batch_sampler, "batch_size", None)
        if size is None:
            return None
        return int(size) // processes if self.preparation.loader_settings.split_batches else int(size)

    def _arguments(self, group: ModelGroup, config: dict[str, Any], stage: int) -> dict[str, Any]:
        if group.optimizer is None:
            # Without an optimizer, only stage 3 has something to shard.
            return {"config": config if stage == 3 else {**config, "zero_optimization": {"stage": 0}}}
        if isinstance(group.optimizer, DummyOptim):
            return {"config": config, "model_parameters": groups_of(group.optimizer)}
        return {"config": config, "optimizer": optimizer_for_engine(group.optimizer, config)}


def _check_batch_norms(model: nn.Module, device: torch.device) -> None:
    """Refuse layers whose weights DeepSpeed casts and whose statistics it keeps, which the CPU cannot compute with."""
    for name, module in model.named_modules():
        mean = getattr(module, "running_mean", None)
        weight = getattr(module, "weight", None)
        if mean is not None and weight is not None and device.type == "cpu" and mean.dtype != weight.dtype:
            raise ConfigurationError(
                f"{name} is a {type(module).__name__} with weights in {weight.dtype} and statistics in {mean.dtype} "
                "under DeepSpeed, and the CPU normalises with one type only. Use mixed_precision='no', or a GPU."
            )


def _cast_inputs_to_bfloat16(_: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    cast: tuple[Any, Any] = recursively_apply(
        torch.Tensor.bfloat16,
        (args, kwargs),
        test_type=lambda value: isinstance(value, torch.Tensor) and value.is_floating_point(),
    )
    return cast

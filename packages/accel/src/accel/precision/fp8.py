"""8-bit floating point, computed by the backends of accel-fp8."""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager
from typing import Any, Final

import torch
from torch import nn
from torch.optim import Optimizer

from accel_state import AcceleratorState, PartialState
from accel_state.errors import ConfigurationError
from accel_state.humanize import counted
from accel_state.logging import get_logger
from accel_state.registry import Registry

from ..core.unwrap import extract_model_from_parallel, is_prepared
from ..kwargs.base import Handlers
from ..kwargs.fp8 import FP8Kwargs
from ..kwargs.handlers import AutocastKwargs
from .amp import AutocastForward
from .full import Precision

# Loaded only when a model computes in 8 bits.
ENGINE: Registry[Any] = Registry(
    "part of accel-fp8", {"recipe": "accel_fp8:FP8Recipe", "create": "accel_fp8:create_backend"}
)

logger: Final = get_logger(__name__)


class FP8Forward(AutocastForward):
    """A model's forward under autocast and in the context of its backend."""

    def __init__(self, model: nn.Module, device_type: str, settings: AutocastKwargs, backend: Any) -> None:
        super().__init__(model.forward, device_type, torch.bfloat16, settings)
        self.backend = backend
        # A copy of a model has a forward of its own, which is bound to it; that of a compiled one is a function.
        self._compiled = None if hasattr(model.forward, "__self__") else weakref.ref(model)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward: Any = self.forward
        model: Any = forward.__self__ if self._compiled is None else self._compiled()
        with self.backend.forward_context(model.training):
            return super().__call__(*args, **kwargs)


class FP8(Precision):
    """Linear layers multiply in 8 bits, other operations compute in bfloat16, and weights keep their dtype."""

    def __init__(self, state: PartialState, handlers: Handlers) -> None:
        super().__init__(state, handlers)
        if not state.device_backend.supports_autocast(torch.bfloat16):
            raise ConfigurationError(
                f"mixed_precision='fp8' is not available on {state.device.type} here: operations other than 8-bit "
                "products need bfloat16, which autocast does not support on it. Use mixed_precision='no', or another "
                "device."
            )
        recipe = ENGINE.load("recipe").from_environment(**handlers.get(FP8Kwargs).recipe_settings())
        self.engine: Any
        self.engine, choice = ENGINE.load("create")(recipe, state.device)
        self.backend: str = choice.name
        self._delayed = choice.name == "native" and recipe.scaling == "delayed"
        self._models: list[weakref.ref[nn.Module]] = []
        logger.info("FP8 backend %s: %s", choice.name, choice.reason)

    @property
    def is_native(self) -> bool:
        return True

    def autocast(self, settings: AutocastKwargs | None = None) -> AbstractContextManager[None]:
        return torch.autocast(self.state.device.type, dtype=torch.bfloat16, **(settings or self.settings).to_autocast())

    def wrap_forward(self, model: nn.Module) -> None:
        model = extract_model_from_parallel(model)
        if "_original_forward" in model.__dict__:
            return
        if self.backend == "ao" and AcceleratorState().is_fsdp2 and self.engine.recipe.enable_fsdp_float8_all_gather:
            # Gathering in 8 bits replaces every parameter, but the script's optimizer holds the old ones.
            logger.info(
                "enable_fsdp_float8_all_gather has no effect under an Accelerator: FSDP gathers weights in the dtype "
                "of the shards. To gather in 8 bits, call accel_fp8.convert(model, recipe, sharded=True) before "
                "you create the optimizer."
            )
        self.engine.convert(model)
        self._models.append(weakref.ref(model))
        model._original_forward = model.forward  # type: ignore[assignment]
        model.forward = FP8Forward(model, self.state.device.type, self.settings, self.engine)

    def prepare_together(self, objects: list[Any], preparation: Any) -> list[Any]:
        if not self.engine.takes_optimizer:
            return objects
        fresh = [index for index, obj in enumerate(objects) if not is_prepared(obj)]
        models = [index for index in fresh if isinstance(objects[index], nn.Module)]
        optimizers = [index for index in fresh if isinstance(objects[index], Optimizer)]
        if not models and not optimizers:
            return objects
        if len(models) != 1 or len(optimizers) != 1:
            raise ConfigurationError(
                f"prepare() got {counted(len(models), 'model')} and {counted(len(optimizers), 'optimizer')}, but the "
                f"FP8 backend {self.backend!r} prepares one model together with its optimizer. Call prepare(model, "
                "optimizer, ...) for each pair."
            )
        before = objects[optimizers[0]]
        model, optimizer = self.engine.initialize(objects[models[0]].to(self.state.device), before)
        for scheduler in (objects[index] for index in fresh):
            if getattr(scheduler, "optimizer", None) is before:
                scheduler.optimizer = optimizer
        replaced = {models[0]: model, optimizers[0]: optimizer}
        return [replaced.get(index, obj) for index, obj in enumerate(objects)]

    def watch(self, optimizer: Optimizer) -> None:
        if self._delayed and self.state.use_distributed:
            # A model is saved between two steps, often on one rank only, and must hold the scales of all ranks.
            optimizer.register_step_post_hook(self._synchronize)

    def check_uneven_inputs(self) -> None:
        if self._delayed and self.state.use_distributed:
            raise ConfigurationError(
                "join_uneven_inputs does not work with delayed FP8 scaling: all ranks, also those without data, are "
                "needed to synchronise scales. Use NativeRecipeKwargs(scaling='dynamic') or --fp8_scaling dynamic, or "
                "keep even_batches=True without join_uneven_inputs."
            )

    def _synchronize(self, *_: Any) -> None:
        for reference in self._models:
            model = reference()
            if model is not None:
                self.engine.synchronize(model)

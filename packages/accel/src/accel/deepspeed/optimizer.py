"""Optimizers for engines: placeholders for those of the configuration, and replacements for those of the script."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn
from torch.optim import Adagrad, Optimizer
from torch.optim.adagrad import adagrad
from torch.optim.lr_scheduler import LRScheduler

from accel_state import get_logger
from accel_state.errors import ConfigurationError

from .. import _torch_compat
from .config_paths import get_value

logger: Final = get_logger(__name__)


if TYPE_CHECKING:
    # `prepare` keeps the types of its arguments, and what it makes of a placeholder has `step`.
    _PlaceholderOptimizer = Optimizer
    _PlaceholderScheduler = LRScheduler
else:
    _PlaceholderOptimizer = _PlaceholderScheduler = object


class DummyOptim(_PlaceholderOptimizer):
    """Placeholder for the optimizer in a script whose DeepSpeed configuration has an "optimizer".

    Args:
        params: parameters or groups of them, as for any torch optimizer.
        lr: replaces "auto" in ``optimizer.params.lr``.
        weight_decay: replaces "auto" in ``optimizer.params.weight_decay``.
        **kwargs: replace "auto" in further ``optimizer.params``, such as ``betas`` and ``eps``.
    """

    def __init__(self, params: Any, lr: float = 0.001, weight_decay: float = 0, **kwargs: Any) -> None:
        self.params = params
        self.lr = lr
        self.weight_decay = weight_decay
        self.kwargs = kwargs


class DummyScheduler(_PlaceholderScheduler):
    """Placeholder for the scheduler in a script whose DeepSpeed configuration has a "scheduler".

    Args:
        optimizer: the optimizer or DummyOptim that it schedules.
        total_num_steps: replaces "auto" in ``scheduler.params.total_num_steps``; counted as a torch scheduler of this
            script would count its steps.
        warmup_num_steps: the same for ``scheduler.params.warmup_num_steps``.
        lr_scheduler_callable: creates a scheduler for the optimizer that DeepSpeed created; for a configuration without
            a "scheduler".
        **kwargs: replace "auto" in further ``scheduler.params``.
    """

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int | None = None,
        warmup_num_steps: int = 0,
        lr_scheduler_callable: Callable[[Any], Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.optimizer = optimizer
        self.total_num_steps = total_num_steps
        self.warmup_num_steps = warmup_num_steps
        self.lr_scheduler_callable = lr_scheduler_callable
        self.kwargs = kwargs


class LateAdagrad(Optimizer):
    """The script's Adagrad with states that are created at the first step, so that ZeRO can shard them."""

    # DeepSpeed would replace torch's Adagrad, which creates them in its constructor, by a new one with a single group.

    def __init__(self, original: Adagrad) -> None:
        super().__init__(original.param_groups, original.defaults)
        _torch_compat.mark_as_stepped(original)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            for parameter in parameters:
                if not self.state[parameter]:
                    value = group["initial_accumulator_value"]
                    self.state[parameter] = {"step": torch.tensor(0.0), "sum": torch.full_like(parameter, value)}
            adagrad(
                parameters,
                [parameter.grad for parameter in parameters],
                [self.state[parameter]["sum"] for parameter in parameters],
                [self.state[parameter]["step"] for parameter in parameters],
                has_sparse_grad=any(parameter.grad.is_sparse for parameter in parameters),
                has_complex=any(parameter.is_complex() for parameter in parameters),
                **{name: group[name] for name in ("foreach", "differentiable", "fused", "maximize")},
                **{name: group[name] for name in ("lr", "weight_decay", "lr_decay", "eps")},
            )
        return loss


def groups_of(optimizer: Optimizer | DummyOptim) -> list[dict[str, Any]]:
    """Return the parameter groups of an optimizer or its placeholder."""
    if isinstance(optimizer, Optimizer):
        return optimizer.param_groups
    if not isinstance(optimizer.params, list):
        # Parameters usually come as a generator, which can be read only once.
        optimizer.params = list(optimizer.params)
    params = optimizer.params
    if params and isinstance(params[0], dict):
        for group in params:
            group["params"] = [group["params"]] if isinstance(group["params"], torch.Tensor) else list(group["params"])
        return params
    return [{"params": params}]


def parameters_of(optimizer: Optimizer | DummyOptim) -> Iterable[nn.Parameter]:
    """Return all parameters of an optimizer or its placeholder."""
    return (parameter for group in groups_of(optimizer) for parameter in group["params"])


def map_pytorch_optim_to_deepspeed(optimizer: Optimizer) -> Optimizer:
    """Replace an optimizer by DeepSpeed's equivalent that is much faster on CPUs.

    Args:
        optimizer: Adam, AdamW, Adagrad or Lion.

    Returns:
        An optimizer that shares the parameter groups, so schedulers of either reach both; ``optimizer`` itself if
        DeepSpeed has no equivalent for its type or options.
    """
    kind = type(optimizer).__name__
    # In newer versions of torch, AdamW is an Adam with this option.
    adamw_mode = bool(optimizer.defaults.get("decoupled_weight_decay", kind == "AdamW"))
    equivalents: dict[str, tuple[str, str, dict[str, Any]]] = {
        "Adam": ("deepspeed.ops.adam", "DeepSpeedCPUAdam", {"adamw_mode": adamw_mode}),
        "AdamW": ("deepspeed.ops.adam", "DeepSpeedCPUAdam", {"adamw_mode": adamw_mode}),
        "Adagrad": ("deepspeed.ops.adagrad", "DeepSpeedCPUAdagrad", {}),
        "Lion": ("deepspeed.ops.lion", "DeepSpeedCPULion", {}),
    }
    if kind not in equivalents or _is_deepspeed_optimizer(optimizer) or _unsupported_option(optimizer):
        return optimizer
    module, name, options = equivalents[kind]
    defaults = optimizer.defaults
    known = {key: defaults[key] for key in ("lr", "betas", "eps", "weight_decay") if key in defaults}
    replacement: Optimizer = getattr(importlib.import_module(module), name)(optimizer.param_groups, **known, **options)
    _torch_compat.mark_as_stepped(optimizer)
    return replacement


def _is_deepspeed_optimizer(optimizer: Optimizer) -> bool:
    return type(optimizer).__module__.startswith("deepspeed.")


def _unsupported_option(optimizer: Optimizer) -> str:
    """Return the first option of an optimizer that DeepSpeed's CPU optimizers do not support, or ""."""
    for name in ("maximize", "amsgrad", "lr_decay", "initial_accumulator_value"):
        for settings in (optimizer.defaults, *optimizer.param_groups):
            if settings.get(name):
                return f"{name}={settings[name]!r}"
    return ""


def optimizer_for_engine(optimizer: Optimizer, config: dict[str, Any]) -> Optimizer:
    """Return the script's optimizer in a form that an engine can shard and offload."""
    device = get_value(config, "zero_optimization.offload_optimizer.device", "none")
    if device not in (None, "none") and config.get("zero_force_ds_cpu_optimizer") is not False:
        kind, original = type(optimizer).__name__, optimizer
        optimizer = map_pytorch_optim_to_deepspeed(original)
        if optimizer is original and not _is_deepspeed_optimizer(original):
            raise ConfigurationError(
                f"offload_optimizer_device={device!r} with {kind}({_unsupported_option(original)}): DeepSpeed has CPU "
                "optimizers for Adam, AdamW, Adagrad and Lion only, without maximize, amsgrad, lr_decay and "
                'initial_accumulator_value. Use one of them, or set "zero_force_ds_cpu_optimizer": false in the '
                "DeepSpeed configuration to update the offloaded states with this optimizer."
            )
        if optimizer is not original:
            text = "%s is replaced by %s to update the offloaded optimizer states."
            logger.info(text, kind, type(optimizer).__name__, main_process_only=True)
    is_sharded = get_value(config, "zero_optimization.stage", 0) > 0
    return LateAdagrad(optimizer) if is_sharded and isinstance(optimizer, Adagrad) else optimizer


def check_ownership(model: nn.Module, optimizer: Optimizer | DummyOptim) -> None:
    """Refuse an optimizer with parameters that are not the model's: the engine would not update them."""
    model_parameters = set(map(id, model.parameters()))
    foreign = sum(id(parameter) not in model_parameters for parameter in parameters_of(optimizer))
    if foreign:
        raise ConfigurationError(
            f"{type(optimizer).__name__} has {foreign} parameters that do not belong to {type(model).__name__}. A "
            "DeepSpeed engine updates one model: create an optimizer for each model from its own parameters."
        )


@functools.cache
def warn_once(message: str) -> None:
    """Log a warning on the main process, once per message."""
    logger.warning(message, main_process_only=True)

"""Adagrad, with states that come at the first step."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Adagrad, Optimizer

from accel_state import get_logger
from accel_state.errors import ConfigurationError

from . import config_paths


class LateAdagrad(Optimizer):
    """The Adagrad of a script, in the form in which ZeRO can divide it.

    torch's has its states from the beginning, so DeepSpeed puts a new one in its place: over all parameters in one
    group, and out of reach of the script's schedulers. Other optimizers make their states at the first step, and so
    does this one.

    Args:
        given: the optimizer; its parameter groups are shared, so what changes its learning rate changes this one's.
    """

    _init_group: Any = Adagrad._init_group

    def __init__(self, given: Adagrad) -> None:
        super().__init__(given.param_groups, given.defaults)
        self._need_device_dtype_check_for_fused = True
        # torch's schedulers warn unless the optimizer that they were made with has stepped.
        given._opt_called = True  # type: ignore[attr-defined]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that have gradients.

        Args:
            closure: computes the loss again.
        """
        for group in self.param_groups:
            for parameter in group["params"]:
                if not self.state[parameter]:
                    self.state[parameter] = {
                        "step": torch.tensor(0.0),
                        "sum": torch.full_like(parameter, group["initial_accumulator_value"]),
                    }
        return Adagrad.step(self, closure)  # type: ignore[arg-type]


class DummyOptim:
    """Takes the place of an optimizer in a script whose DeepSpeed configuration has an "optimizer".

    Args:
        params: parameters or groups of them, as for any torch optimizer.
        lr: what "auto" stands for in ``optimizer.params.lr``.
        weight_decay: what "auto" stands for in ``optimizer.params.weight_decay``.
        **kwargs: what "auto" stands for in further ``optimizer.params``, such as ``betas`` and ``eps``.
    """

    def __init__(self, params: Any, lr: float = 0.001, weight_decay: float = 0, **kwargs: Any) -> None:
        self.params = params
        self.lr = lr
        self.weight_decay = weight_decay
        self.kwargs = kwargs


class DummyScheduler:
    """Takes the place of a scheduler in a script whose DeepSpeed configuration has a "scheduler".

    Args:
        optimizer: the optimizer or DummyOptim that it schedules.
        total_num_steps: steps of the schedule, in the same steps as those of a torch scheduler in this script; what
            "auto" stands for in ``scheduler.params.total_num_steps``.
        warmup_num_steps: the same for ``scheduler.params.warmup_num_steps``.
        lr_scheduler_callable: makes a scheduler of the optimizer that DeepSpeed made, for a configuration without a
            "scheduler".
        **kwargs: what "auto" stands for in further ``scheduler.params``.
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


logger = get_logger(__name__)

_ONLY_TORCH = ("maximize", "amsgrad", "lr_decay", "initial_accumulator_value")


def groups_of(optimizer: Optimizer | DummyOptim) -> list[dict[str, Any]]:
    """The parameter groups of an optimizer or of what stands in for one."""
    if isinstance(optimizer, Optimizer):
        return optimizer.param_groups
    if not isinstance(optimizer.params, list):
        # Parameters usually come as a generator, which can be read once.
        optimizer.params = list(optimizer.params)
    given = optimizer.params
    if given and isinstance(given[0], dict):
        for group in given:
            group["params"] = [group["params"]] if isinstance(group["params"], torch.Tensor) else list(group["params"])
        return given
    return [{"params": given}]


def parameters_of(optimizer: Optimizer | DummyOptim) -> Iterable[nn.Parameter]:
    """All parameters of an optimizer or of what stands in for one."""
    return (parameter for group in groups_of(optimizer) for parameter in group["params"])


def map_pytorch_optim_to_deepspeed(optimizer: Optimizer) -> Optimizer:
    """The optimizer of DeepSpeed that computes the same on a CPU, many times faster; the given one where there is none.

    Args:
        optimizer: Adam, AdamW, Adagrad or Lion. One with an option that DeepSpeed's does not know (``maximize``) stays
            as it is.

    Returns:
        An optimizer over the same parameter groups: what changes the learning rate of the given one changes this one's.
    """
    kind = type(optimizer).__name__
    # In newer versions of torch, AdamW is an Adam with this option.
    decoupled = bool(optimizer.defaults.get("decoupled_weight_decay", kind == "AdamW"))
    found: dict[str, tuple[str, str, dict[str, Any]]] = {
        "Adam": ("deepspeed.ops.adam", "DeepSpeedCPUAdam", {"adamw_mode": decoupled}),
        "AdamW": ("deepspeed.ops.adam", "DeepSpeedCPUAdam", {"adamw_mode": decoupled}),
        "Adagrad": ("deepspeed.ops.adagrad", "DeepSpeedCPUAdagrad", {}),
        "Lion": ("deepspeed.ops.lion", "DeepSpeedCPULion", {}),
    }
    if kind not in found or type(optimizer).__module__.startswith("deepspeed.") or _beyond(optimizer):
        return optimizer
    module, name, options = found[kind]
    known = {
        key: optimizer.defaults[key] for key in ("lr", "betas", "eps", "weight_decay") if key in optimizer.defaults
    }
    made: Optimizer = getattr(importlib.import_module(module), name)(optimizer.param_groups, **known, **options)
    # torch's schedulers warn unless the optimizer that they were made with has stepped.
    optimizer._opt_called = True  # type: ignore[attr-defined]
    return made


def _beyond(optimizer: Optimizer) -> list[str]:
    """The options of an optimizer that DeepSpeed's optimizers for host memory would leave out."""
    settings = [optimizer.defaults, *optimizer.param_groups]
    return [f"{name}={group[name]!r}" for name in _ONLY_TORCH for group in settings if group.get(name)][:1]


def for_offload(optimizer: Optimizer, config: dict[str, Any]) -> Optimizer:
    """The optimizer that updates states which lie in host memory.

    Args:
        optimizer: of the script.
        config: the complete DeepSpeed configuration.

    Raises:
        ConfigurationError: DeepSpeed has none of this kind, and the configuration does not allow another one.
    """
    device = config_paths.get(config, "zero_optimization.offload_optimizer.device", "none")
    if device in (None, "none") or config.get("zero_force_ds_cpu_optimizer") is False:
        return optimizer
    made = map_pytorch_optim_to_deepspeed(optimizer)
    if made is optimizer and not type(optimizer).__module__.startswith("deepspeed."):
        kind = type(optimizer).__name__
        raise ConfigurationError(
            f"offload_optimizer_device={device!r} with {kind}({', '.join(_beyond(optimizer))}): DeepSpeed has fast "
            "optimizers for host "
            "memory in place of Adam, AdamW, Adagrad and Lion only, without maximize, amsgrad, lr_decay and "
            "initial_accumulator_value. "
            'Use one of them, or put "zero_force_ds_cpu_optimizer": false into the DeepSpeed configuration to have '
            "this one update the "
            "offloaded states."
        )
    if made is not optimizer:
        logger.info(
            "%s is replaced by %s, which updates offloaded states.",
            type(optimizer).__name__,
            type(made).__name__,
            main_process_only=True,
        )
    return made


def for_engine(optimizer: Optimizer, config: dict[str, Any]) -> Optimizer:
    """The optimizer of a script, in the form in which an engine can divide it.

    Args:
        optimizer: of the script.
        config: the complete DeepSpeed configuration.

    Raises:
        ConfigurationError: its states are to be offloaded, and DeepSpeed cannot.
    """
    made = for_offload(optimizer, config)
    divided = config_paths.get(config, "zero_optimization.stage", 0) > 0
    return LateAdagrad(made) if divided and isinstance(made, torch.optim.Adagrad) else made


def check_ownership(model: nn.Module, optimizer: Optimizer | DummyOptim) -> None:
    """Refuse an optimizer of which an engine would leave parameters out.

    Raises:
        ConfigurationError: it has parameters that are not the model's.
    """
    own = set(map(id, model.parameters()))
    foreign = sum(id(parameter) not in own for parameter in parameters_of(optimizer))
    if foreign:
        raise ConfigurationError(
            f"{type(optimizer).__name__} has {foreign} parameters that are not those of {type(model).__name__}. A "
            "DeepSpeed engine "
            "updates one model: give each model an optimizer of its own, made from its parameters."
        )


@functools.cache
def warn_once(message: str) -> None:
    """Warn on the main process, the first time only."""
    logger.warning(message, main_process_only=True)

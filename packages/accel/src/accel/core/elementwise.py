"""Optimizers whose update of an element depends on others, where a rank has a part of the parameters."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, Final

import torch
from torch import nn
from torch.optim import Optimizer

from accel_state.errors import ConfigurationError
from accel_state.operations import recursively_apply

logger: Final = logging.getLogger(__name__)

_TOLERANCE: Final = 0.01  # of the largest update: far above rounding, far below what a norm changes


History = list[torch.Tensor]
"""A small parameter, and its gradients in the steps that follow."""


def refuse_unless_elementwise(optimizer: Optimizer, where: str, instead: str) -> None:
    """Refuse an optimizer that a rank would step with pieces of flat parameters, but that looks at whole ones.

    Args:
        optimizer: of the script. Neither it nor its parameters nor the random generators are changed.
        where: what flattens parameters, for the message.
        instead: what to use, likewise.

    Raises:
        ConfigurationError: its update of an element depends on others, as in LAMB, LARS, Adafactor and Prodigy, or is
            random.
    """
    if not is_elementwise(optimizer):
        _refuse_noise(optimizer, where)
        raise ConfigurationError(
            f"{type(optimizer).__name__} cannot be used with {where}, which gives each rank pieces of flattened "
            "parameters: it computes the update of an element from other elements, such as the norm of the parameter "
            f"or its rows and columns. Use {instead}, or an element-wise optimizer such as torch.optim.AdamW."
        )


def refuse_global_statistics(optimizer: Optimizer, where: str) -> None:
    """Refuse an optimizer whose update of a parameter depends on other parameters, of which a rank has a part.

    Raises:
        ConfigurationError: it does, as in Prodigy and D-Adaptation, or is random.
    """
    halves = _halves()
    if not _is_unchanged(optimizer, halves, [[half] for half in halves]):
        _refuse_noise(optimizer, where)
        raise ConfigurationError(
            f"{type(optimizer).__name__} cannot be used with {where}: it computes the update of a parameter from all "
            "of them, and a rank has a part of each. Use DDP, or another optimizer, such as torch.optim.AdamW."
        )


def is_elementwise(optimizer: Optimizer) -> bool:
    """Return False if an optimizer updates a matrix in another way than the flattened halves of it on their own.

    A copy of it is asked, with its settings and small parameters. It counts as element-wise if that is not possible.
    """
    halves = _halves()
    whole = list(map(torch.cat, zip(*halves, strict=True)))
    return _is_unchanged(optimizer, [whole], [[list(map(torch.flatten, half))] for half in halves])


def _halves() -> list[History]:
    """Return two matrices with other norms."""
    generator = torch.Generator().manual_seed(0)
    return [[scale * torch.randn(4, 8, generator=generator) for _ in range(4)] for scale in (1, 20)]


def _refuse_noise(optimizer: Optimizer, where: str) -> None:
    """Refuse an optimizer that updates the same parameters in another way each time, as Langevin dynamics does."""
    halves = _halves()
    first, second = _updates(optimizer, [halves, halves]) or (torch.zeros(1), torch.zeros(1))
    if _differ(first, second):
        raise ConfigurationError(
            f"{type(optimizer).__name__} cannot be used with {where}: its updates contain random numbers, which each "
            "rank would draw for its own parts of the parameters, with one seed the same for each part. Use DDP with "
            "one seed on all ranks: accel.utils.set_seed(seed)."
        )


def _is_unchanged(optimizer: Optimizer, together: list[History], apart: list[list[History]]) -> bool:
    """Return whether an optimizer updates parameters together as it does apart; True if a copy cannot be asked."""
    updates = _updates(optimizer, [together, *apart])
    if updates is None:
        return True
    ours, *alone = updates
    return not any(map(_differ, ours.chunk(len(alone)), alone))


def _differ(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool((one - other).abs().max() > _TOLERANCE * one.abs().max())


def _updates(optimizer: Optimizer, trials: list[list[History]]) -> list[torch.Tensor] | None:
    """Return how copies of an optimizer update the parameters of each trial; None if a copy cannot be asked."""
    if type(optimizer).__module__.startswith("torchao.") or _holds_parameters(optimizer):
        return None
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    device = next((parameter.device for parameter in parameters if not parameter.is_meta), torch.device("cpu"))
    with torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=device.type):
        try:
            return [_update(optimizer, histories, device) for histories in trials]
        except Exception as error:
            # One of another library may need more than parameters with gradients, such as a closure.
            logger.info("What an update of %s depends on is not known: %r", type(optimizer).__name__, error)
            return None


def _holds_parameters(optimizer: Optimizer) -> bool:
    """Return True if a copy of an optimizer could still change the parameters, or another optimizer that is in it."""
    for name, value in vars(optimizer).items():
        if name in ("state", "param_groups", "defaults"):
            continue
        inner: Iterable[Any] = (value,)
        if isinstance(value, (dict, list, tuple, set)):
            inner = value.values() if isinstance(value, dict) else value
        for item in inner:
            if isinstance(item, (nn.Parameter, nn.Module)) or hasattr(item, "param_groups"):
                return True
    return False


def _update(optimizer: Optimizer, histories: list[History], device: torch.device) -> torch.Tensor:
    """Return how three steps change parameters, flattened, with the settings of the optimizer's first group."""
    parameters = [nn.Parameter(weight.to(device, copy=True)) for weight, *_ in histories]
    group = {**optimizer.param_groups[0], "params": parameters}
    if isinstance(group.get("lr"), (int, float)) and not group["lr"]:
        group["lr"] = 0.01  # a schedule warms up from 0
    twin: Any = object.__new__(type(optimizer))
    for name, value in vars(optimizer).items():
        if name in ("state", "param_groups"):
            continue
        if name.startswith("_optimizer_"):
            value = type(value)()  # without hooks
        elif isinstance(value, set):
            value = value.copy()
        vars(twin)[name] = recursively_apply(torch.clone, value)  # a step may change tensors in place
    vars(twin).update(state=defaultdict(dict), param_groups=[group])
    for step in range(1, len(histories[0])):
        for parameter, history in zip(parameters, histories, strict=True):
            parameter.grad = history[step].to(device, copy=True)
        type(optimizer).step(twin)  # not that of the object, which schedules count
    changes = (parameter.detach().cpu() - history[0] for parameter, history in zip(parameters, histories, strict=True))
    return torch.cat([change.flatten() for change in changes])

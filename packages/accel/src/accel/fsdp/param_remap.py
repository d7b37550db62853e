"""Points optimizers at the parameters that sharding puts in the place of a model's own."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from accel_state.errors import ConfigurationError

from ..core.torch_clipping import refuse_torchs_clipping

Shard = Callable[[torch.Tensor], torch.Tensor]
"""Returns this rank's part of a tensor that has the shape of the full parameter."""


def step_kinds_apart(optimizer: Optimizer) -> None:
    """Update sharded parameters (DTensors) and others of the same group separately.

    torch's operators over lists of tensors, which optimizers use by default on accelerators, do not mix the two. Where
    the optimizer was created with ``foreach=True`` or ``fused=True``, each kind has a list of its own during a step.
    Otherwise, parameters are updated one by one.

    Raises:
        ConfigurationError: it is not one of torch's, and asks for these operators. Its step may keep values in groups.
    """
    for group in optimizer.param_groups:
        if len(_kinds(group)) == 1 or "foreach" not in group:
            continue
        if not (group["foreach"] or group.get("fused")):
            group["foreach"] = False
        elif not type(optimizer).__module__.startswith("torch.optim."):
            raise ConfigurationError(
                f"{type(optimizer).__name__} with foreach or fused updates sharded parameters together with others, "
                "which torch cannot, and dividing its groups was compared for torch's optimizers only. Set foreach and "
                "fused to False, or give each kind a group of its own."
            )
        elif optimizer not in _divided:
            _divided[optimizer] = True
            optimizer.step = MethodType(_divide_groups(optimizer.step), optimizer)  # type: ignore[method-assign]


_divided: Any = WeakIdKeyDictionary()
"""Optimizers whose groups are divided during a step."""


def _divide_groups(step: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(step)
    def divided(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        groups = optimizer.param_groups
        optimizer.param_groups = [{**group, "params": kind} for group in groups for kind in _kinds(group)]
        try:
            return step(*args, **kwargs)
        finally:
            optimizer.param_groups = groups

    return divided


def _kinds(group: dict[str, Any]) -> list[list[torch.Tensor]]:
    """Return the parameters of a group: sharded ones and others, or one list if all are of one kind."""
    kinds: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    for parameter in group["params"]:
        kinds[isinstance(parameter, DTensor)].append(parameter)
    return list(kinds) if all(kinds) else [group["params"]]


class Replacements:
    """New parameters by the ones they replaced, for optimizers prepared before the model or after it."""

    def __init__(self) -> None:
        # An entry is dropped with the last reference to the old parameter.
        self._by_old: Any = WeakIdKeyDictionary()

    def __getstate__(self) -> dict[str, Any]:
        """Without the replaced parameters: those in a pickle or a copy are others."""
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._by_old = WeakIdKeyDictionary()

    def add(self, old: nn.Parameter, new: nn.Parameter, shard: Shard) -> None:
        """Record that ``new`` replaces ``old``; ``shard`` slices optimizer state of the shape of ``old``."""
        if old is not new:
            self._by_old[old] = new, shard
            refuse_torchs_clipping([old], "prepare() has replaced its parameters", elsewhere=True)

    def __contains__(self, old: torch.Tensor) -> bool:
        return old in self._by_old

    def current(self, parameters: Iterable[Any]) -> list[Any]:
        """Return the new parameters in the place of the ones they replaced."""
        return [self._by_old[item][0] if item in self._by_old else item for item in parameters]

    def apply(self, optimizer: Optimizer) -> None:
        """Replace parameters in an optimizer's groups, and keep this rank's part of its state."""
        for group in optimizer.param_groups:
            group["params"] = self.current(group["params"])
        for old in [parameter for parameter in optimizer.state if parameter in self._by_old]:
            new, shard = self._by_old[old]
            state = optimizer.state.pop(old)
            for key, value in state.items():
                # Moments have the parameter's shape; step counts and the like are the same on all ranks.
                if isinstance(value, torch.Tensor) and value.ndim and value.shape == old.shape:
                    state[key] = shard(value)
            optimizer.state[new] = state

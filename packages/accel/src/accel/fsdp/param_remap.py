"""Points optimizers at the parameters that sharding puts in the place of a model's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from accel_state.errors import ConfigurationError

Shard = Callable[[torch.Tensor], torch.Tensor]
"""Returns this rank's part of a tensor that has the shape of the full parameter."""


def step_kinds_apart(optimizer: Optimizer) -> None:
    """Update parameters one by one in groups where some are sharded (DTensors) and others are not.

    torch's operators over lists of tensors, which optimizers use by default on accelerators, do not mix the two.

    Raises:
        ConfigurationError: the optimizer was created with ``foreach=True``, which asks for these operators.
    """
    for group in optimizer.param_groups:
        sharded = [isinstance(parameter, DTensor) for parameter in group["params"]]
        if not any(sharded) or all(sharded) or "foreach" not in group:
            continue
        if group["foreach"]:
            raise ConfigurationError(
                f"{type(optimizer).__name__}(foreach=True) cannot update {sum(sharded)} sharded parameters together "
                f"with {len(sharded) - sum(sharded)} others. Leave foreach out, or give each kind a group of its own."
            )
        if not group.get("fused"):
            group["foreach"] = False


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

    def __contains__(self, old: torch.Tensor) -> bool:
        return old in self._by_old

    def apply(self, optimizer: Optimizer) -> None:
        """Replace parameters in an optimizer's groups, and keep this rank's part of its state."""
        for group in optimizer.param_groups:
            group["params"] = [self._by_old[item][0] if item in self._by_old else item for item in group["params"]]
        for old in [parameter for parameter in optimizer.state if parameter in self._by_old]:
            new, shard = self._by_old[old]
            state = optimizer.state.pop(old)
            for key, value in state.items():
                # Moments have the parameter's shape; step counts and the like are the same on all ranks.
                if isinstance(value, torch.Tensor) and value.ndim and value.shape == old.shape:
                    state[key] = shard(value)
            optimizer.state[new] = state

"""Optimizers keep pointing at a model's parameters when sharding replaces them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

Shard = Callable[[torch.Tensor], torch.Tensor]
"""Cuts this rank's part of a tensor that has the shape of the whole parameter."""


class Replacements:
    """What became of parameters that an optimizer may still hold, be it prepared before the model or after it."""

    def __init__(self) -> None:
        # An entry goes when nobody holds the old parameter any more.
        self._by_old: Any = WeakIdKeyDictionary()

    def add(self, old: nn.Parameter, new: nn.Parameter, shard: Shard) -> None:
        """Note that ``new`` stands for ``old``, whose whole-shaped companions ``shard`` cuts."""
        if old is not new:
            self._by_old[old] = new, shard

    def apply(self, optimizer: Optimizer) -> None:
        """Replace parameters in an optimizer's groups, and cut its state to this rank's part."""
        for group in optimizer.param_groups:
            group["params"] = [self._by_old[item][0] if item in self._by_old else item for item in group["params"]]
        for old in [parameter for parameter in optimizer.state if parameter in self._by_old]:
            new, shard = self._by_old[old]
            state = optimizer.state.pop(old)
            optimizer.state[new] = {key: _cut(value, old, shard) for key, value in state.items()}


def _cut(value: Any, old: torch.Tensor, shard: Shard) -> Any:
    # Moments have the parameter's shape; step counts and the like are kept whole.
    return shard(value) if isinstance(value, torch.Tensor) and value.ndim and value.shape == old.shape else value

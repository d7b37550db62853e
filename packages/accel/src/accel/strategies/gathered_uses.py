"""Uses of weights that FSDP 2 leaves gathered, between two calls of their unit in one step.

The backward pass of the second call frees the weights. That of the use would read freed memory after it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from accel_state.errors import ConfigurationError

from .._torch_compat import fsdp2_parameters, gathered_parameter
from . import outside_forward


class GatheredUses:
    """The calls of units that stay gathered after a forward pass, since the last backward pass."""

    def __init__(self) -> None:
        # The numbers of the nodes at begin (1) and end (-1) of each call, by unit; a call may contain others.
        self._calls: Any = WeakIdKeyDictionary()
        self._owners: Any = WeakIdKeyDictionary()  # the name and the unit of each parameter, by what holds its state
        self._probe = torch.zeros((), requires_grad=True)

    def follow(self, unit: nn.Module, names: Mapping[nn.Parameter, str]) -> None:
        """Note the calls of a unit with gradients, inner units first; ``names`` are those of its sharded parameters."""
        self._calls[unit] = []
        for parameter, holder in fsdp2_parameters(unit):
            if holder not in self._owners:
                self._owners[holder] = names[parameter], weakref.ref(unit)
        note = torch.compiler.disable(self._note)
        unit.register_forward_pre_hook(partial(note, 1), prepend=True)
        unit.register_forward_hook(partial(note, -1), always_call=True)  # a call that fails ends too

    def _note(self, change: int, unit: nn.Module, *_: Any) -> None:
        if torch.is_grad_enabled():
            number = self._probe.add(0).grad_fn._sequence_nr()  # type: ignore[union-attr]
            self._calls[unit].append((number, change))

    @contextmanager
    def checked(self, loss: torch.Tensor, advice: str) -> Iterator[None]:
        """Check a loss before its backward pass, and forget the calls after it: checkpointing repeats some in it.

        Args:
            loss: the loss.
            advice: what to do instead of using a gathered weight outside of the calls of its unit.

        Raises:
            ConfigurationError: the loss uses one, and the unit was called several times.
        """
        try:
            if any(len(calls) > 2 for calls in self._calls.values()):
                self._check(loss, advice)
            yield
        finally:
            for calls in self._calls.values():
                calls.clear()

    def _check(self, loss: torch.Tensor, advice: str) -> None:
        owners = {
            id(gathered_parameter(holder)): (name, self._calls[unit()]) for holder, (name, unit) in self._owners.items()
        }
        for node, leaf in outside_forward.uses_of_leaves(loss):
            name, calls = owners.get(id(leaf.variable), ("", []))
            running = sum(change for number, change in calls if number < node._sequence_nr())
            if len(calls) > 2 and not running:
                raise ConfigurationError(outside_forward.message(name, advice))

"""Which units of a sharded model each rank has called, to name the one that a rank left out.

A unit is gathered from all ranks. If one of them leaves it out, the others wait, or take the parameters of another unit
for it (:mod:`accel.strategies.unit_order` finds that). In debug mode each call is compared through the store of the
process group; otherwise, a rank whose forward or backward pass did not complete compares what it called with the
others.
"""

from __future__ import annotations

import sys
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import torch
from torch import nn

from accel_state import PartialState, get_logger
from accel_state.collectives.diagnosis import exchange, is_lost
from accel_state.errors import CollectiveTimeoutError

from .._torch_compat import default_store
from .unit_order import ADVICE

logger: Final = get_logger(__name__)

_KEPT: Final = 4096  # calls in evaluations with gradients are ended by no backward pass
BACKWARD: Final = "the backward pass"


class UnitCalls:
    """The calls of units on this rank since the last backward pass."""

    def __init__(self, state: PartialState) -> None:
        self._rank, self._ranks, self._debug = state.process_index, state.num_processes, state.debug
        self._called: deque[str] = deque(maxlen=_KEPT)
        self._compared = 0

    def follow(self, model: nn.Module, units: Sequence[tuple[str, nn.Module]]) -> None:
        """Note the calls of a model's units. Call it after ``fully_shard``, whose hooks gather them."""
        for name, unit in units:
            unit.register_forward_pre_hook(partial(self._call, name), prepend=True)
        model.register_forward_hook(self._end, always_call=True)

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Name the units that a rank left out in the error of a backward pass."""
        if self._debug:
            self._compare(BACKWARD)
        try:
            yield
        except RuntimeError as error:
            found = self._left_out() if is_lost(error) else None
            if found is None:
                raise
            raise CollectiveTimeoutError(f"the backward pass did not complete: {error}\n{found}") from error
        self._called.clear()

    def _end(self, module: nn.Module, inputs: Any, output: Any) -> None:
        error = sys.exc_info()[1]
        if error is None and not torch.is_grad_enabled():
            self._called.clear()  # no backward pass does
        found = self._left_out() if isinstance(error, RuntimeError) and is_lost(error) else None
        if found is not None:
            # torch drops what hooks of a failed call raise.
            logger.error("The forward pass did not complete: %s\n%s", error, found, main_process_only=False)

    def _call(self, name: str, module: nn.Module, inputs: Any) -> None:
        self._called.append(name)
        if self._debug:
            self._compare(name)

    def _compare(self, name: str) -> None:
        """Leave a note of a call, and compare it with those that are there; no rank waits."""
        self._compared += 1
        store: Any = default_store()
        key = f"accel/units/{self._compared}"
        store.set(f"{key}/{self._rank}", name)
        for other in range(self._ranks):
            if other == self._rank or not store.check([f"{key}/{other}"]):
                continue
            its = store.get(f"{key}/{other}").decode()
            if its != name:
                raise CollectiveTimeoutError(
                    f"rank {self._rank} has come to {name}, and rank {other} to {its}, in a model that FSDP shards. "
                    f"{ADVICE}"
                )

    def _left_out(self) -> str | None:
        """Return what ranks called and others did not; None if there is no difference between those that answered."""
        calls = exchange(list(self._called), self._rank, self._ranks, "units")
        counts = {rank: Counter(names) for rank, names in calls.items()}
        most: Counter[str] = Counter()
        for count in counts.values():
            most |= count
        lines = []
        for rank, count in sorted(counts.items()):
            missing = sorted(most - count)
            if missing:
                lines.append(f"  rank {rank} did not call {', '.join(missing)}")
        return "\n".join([*lines, ADVICE]) if lines else None

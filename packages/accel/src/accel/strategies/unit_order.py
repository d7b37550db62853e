"""Checks that the ranks that shard a model gather and reduce its units in the same order.

Collectives match by their order, not by the unit that they are for. A rank that calls another unit than the others do,
of the same size, would take their parts for those of its own unit, and compute wrong numbers without an error. So would
one whose loss uses other parameters of a unit. Each rank therefore folds what it gathers and reduces, and which
parameters have a gradient, into one number. Ranks compare the numbers before an optimizer steps: in all of the first
steps, and then in as many as 1% of the run time allows.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Final, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from accel_state import PartialState
from accel_state.collectives.diagnosis import exchange
from accel_state.collectives.header import Schedule
from accel_state.collectives.single import Collectives
from accel_state.errors import DistributedOperationException

from .._torch_compat import (
    flat_parameters,
    follow_collectives,
    fsdp2_groups,
    is_about_to_gather,
    process_groups_of_unit,
)
from ..core.unwrap import clean_name

_KEPT: Final = 4096  # collectives of a step that an error can name
ADVICE: Final = (
    "Every rank must call every unit, in the same order, and use the same parameters: where an output does not count, "
    "add it times 0 (x + 0 * block(x))."
)


class GroupOrder:
    """What this rank has gathered and reduced over one process group, in one number."""

    def __init__(self, collectives: Collectives) -> None:
        shared = collectives.schedule
        self.schedule = Schedule(host=shared is None or shared.host)
        self._collectives = collectives
        self._digest = 0

    def fold(self, *values: object) -> None:
        """Add an event to what has happened so far."""
        self._digest = hash((self._digest, *values))

    def agrees(self) -> bool:
        """Return True if all ranks of the group have done the same. They must all call it."""
        mine = self.schedule.measurements()
        begin = time.perf_counter()
        rows = self._collectives.all_gather(torch.tensor([self._digest, *mine]), "optimizer.step").tolist()
        self.schedule.plan([row[1:] for row in rows], time.perf_counter() - begin)
        return all(row[0] == self._digest for row in rows)


class UnitOrder:
    """What this rank has gathered and reduced for the models of a strategy."""

    def __init__(self, state: PartialState) -> None:
        self._state = state
        self._orders: dict[Any, GroupOrder] = {}  # by process group
        self._events: list[str] = []  # all that can happen
        self._recent: deque[int] = deque(maxlen=_KEPT)  # what has happened since the last step
        self._steps = self._agreed = 0
        self._parameters: Any = WeakIdKeyDictionary()  # the name and the orders of each, and what has its gradient
        self._updated: Any = WeakIdKeyDictionary()  # the parameters of each optimizer, by order

    def follow(self, model: nn.Module) -> None:
        """Note the collectives of a model's units from now on."""
        names = {parameter: clean_name(name) for name, parameter in model.named_parameters()}
        titles: dict[Any, str] = {}
        for name, module in model.named_modules():
            if isinstance(module, FSDPModule):
                units = fsdp2_groups(cast(nn.Module, module))
                titles.update(dict.fromkeys(units, clean_name(name)))  # inner ones come last
        for unit, title in titles.items():
            orders = [self._order_of(group) for group in process_groups_of_unit(unit) if group.size() > 1]
            parameters = [holder.sharded_param for holder in unit.fsdp_params]
            for parameter in parameters:
                self._parameters[parameter] = (names[parameter], orders, parameter)
            title = title or f"what is in no unit of {type(model).__name__}"
            # Replicas reduce the same units, but each of them may call them as often as it likes.
            gathers = partial(self._note, self._number(f"gathers {title}"), orders[:1], ())
            reduces = partial(self._note, self._number(f"reduces {title}"), orders, parameters)
            follow_collectives(unit, gathers, reduces)

    def follow_flat(self, wrapped: nn.Module) -> None:
        """Note which units of a model wrapped by FSDP 1 are gathered in forward passes.

        Which of them have a gradient is compared before steps: what happens in backward passes cannot be followed.
        """
        units = [module for module in FullyShardedDataParallel.fsdp_modules(wrapped) if module._handle is not None]
        names = {module: clean_name(name) for name, module in wrapped.named_modules()}
        for unit, flat in zip(units, flat_parameters(wrapped), strict=True):
            if flat.group is None or flat.group.size() == 1:
                continue
            orders = [self._order_of(flat.group)]
            title = names[unit] or f"what is in no unit of {type(unit.module).__name__}"
            for parameter in [flat.flat, *flat.originals]:
                self._parameters[parameter] = (title, orders, flat.flat)
            unit.register_forward_pre_hook(partial(self._note_call, self._number(f"gathers {title}"), orders))

    def _note_call(self, event: int, orders: Iterable[GroupOrder], unit: nn.Module, inputs: Any) -> None:
        if is_about_to_gather(unit):
            self._note(event, orders, ())

    def _order_of(self, group: Any) -> GroupOrder:
        if group not in self._orders:
            self._orders[group] = GroupOrder(self._state.collectives.over(group))
        return self._orders[group]

    def _number(self, event: str) -> int:
        self._events.append(event)
        return len(self._events) - 1

    def _note(self, event: int, orders: Iterable[GroupOrder], parameters: Iterable[torch.Tensor]) -> None:
        self._recent.append(event)
        before = _without_gradient(parameters)  # in a step of several backward passes, by the former ones
        for order in orders:
            order.fold(event, before)

    def watch(self, optimizer: Optimizer) -> None:
        """Note which parameters an optimizer updates."""
        updated: dict[GroupOrder, dict[torch.Tensor, None]] = {}
        for parameter in (item for group in optimizer.param_groups for item in group["params"]):
            _, orders, owner = self._parameters.get(parameter, ("", (), parameter))
            for order in orders:
                updated.setdefault(order, {})[owner] = None
        self._updated[optimizer] = updated

    def before_step(self, optimizer: Optimizer) -> None:
        """Compare the ranks, now and then; not those that step alone, as torch does to create an optimizer's state."""
        updated = self._updated.get(optimizer)
        if not updated:
            return
        self._steps += 1
        due = [order for order in updated if order.schedule.is_due()]
        for order in due:
            order.fold(_without_gradient(updated[order]))
        self._compare(due, f"step {self._steps}, which was not taken", optimizer)
        self._recent.clear()

    def check(self) -> None:
        """Compare the ranks before a state is saved; all of them must call it."""
        for order in self._orders.values():
            order.schedule.is_due()  # which counts the call
        self._compare(list(self._orders.values()), "the state was saved")

    def _compare(self, orders: Sequence[GroupOrder], place: str, optimizer: Optimizer | None = None) -> None:
        # Ranks of other groups wait for all of them.
        if not all([order.agrees() for order in orders]):
            raise DistributedOperationException(self._explain(place, optimizer))
        if orders:
            self._agreed = self._steps

    def _explain(self, place: str, optimizer: Optimizer | None) -> str:
        done = [self._events[event] for event in self._recent]
        updated = {} if optimizer is None else self._updated[optimizer]
        for parameter in dict.fromkeys(item for items in updated.values() for item in items):
            if parameter.grad is not None:
                done.append(f"has a gradient of {self._parameters[parameter][0]}")
        found = sorted(exchange(done, self._state.process_index, self._state.num_processes, f"{place}").items())
        known = "  The difference is older than this step, or in an earlier micro batch."
        for number in range(max(len(events) for _, events in found)):
            events = [(rank, own[number] if number < len(own) else "does no more") for rank, own in found]
            if len({event for _, event in events}) > 1:
                known = "\n".join(f"  rank {rank} {event}" for rank, event in events)
                break
        return (
            "Ranks have called different units of a model that FSDP shards, or used different parameters of a unit, "
            f"and have computed with each other's weights and gradients. It was found before {place}; the ranks last "
            f"agreed in step {self._agreed}. The first difference:\n{known}\n{ADVICE} Or train with DDP and "
            "DistributedDataParallelKwargs(find_unused_parameters=True)."
        )


def _without_gradient(parameters: Iterable[torch.Tensor]) -> tuple[bool, ...]:
    return tuple([parameter.grad is None for parameter in parameters])

"""Changes of a configuration that take less memory, from the cheapest in time to the most expensive."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from accel_state.errors import ConfigurationError
from accel_state.options import Resolution, Source

from .plan import PlanRequest, RankPlan, make_plan

SHOWN_CHANGES = 3


@dataclass(frozen=True)
class Change:
    """A change, and the memory that the device must have with it."""

    description: str
    total: int  # bytes of the peak and the reserve


@dataclass(frozen=True)
class Changes:
    """What makes a plan fit."""

    changes: tuple[Change, ...]
    together: bool  # whether all of them are needed; otherwise each is enough
    fits: bool  # whether the plan fits with them


def changes_that_fit(plan: RankPlan, request: PlanRequest) -> Changes:
    """Return the cheapest three changes that make a plan fit in ``request.memory_limit``, or what helps together."""
    limit = request.memory_limit or 0
    enough: list[Change] = []
    for description, change in _candidates(plan, request):
        total = _total(change(request))
        if total is not None and total <= limit:
            enough.append(Change(description, total))
            if len(enough) == SHOWN_CHANGES:
                break
    if enough:
        return Changes(tuple(enough), together=False, fits=True)
    together: list[Change] = []
    best = plan.needed
    for description, change in _candidates(plan, request):
        changed = change(request)
        total = _total(changed)
        if total is not None and total < best and best > limit:
            request, best = changed, total
            together.append(Change(description, total))
    return Changes(tuple(together), together=True, fits=best <= limit)


def _total(request: PlanRequest) -> int | None:
    try:
        plan = make_plan(request)
    except ConfigurationError:
        return None  # the change does not apply to this configuration
    return None if plan.peak is None else plan.needed


def _candidates(plan: RankPlan, request: PlanRequest) -> Iterator[tuple[str, Callable[[PlanRequest], PlanRequest]]]:
    if plan.implementation != "fused" and plan.optimizer != "sgd":
        yield "--optimizer_implementation fused", lambda given: replace(given, implementation="fused")
    if plan.strategy == "fsdp2_no_reshard":
        yield "fsdp_reshard_after_forward: true", _setting(fsdp_reshard_after_forward=True)
    if plan.strategy in ("ddp", "no_shard") and plan.processes > 1 and plan.pipeline is None:
        wrapped = {"fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
        yield "fsdp_version: 2 with fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP", _setting(use_fsdp=True, **wrapped)
    if plan.pipeline is None and not request.split_batches:
        samples, divisor = len(plan.batch.samples), 2
        while divisor <= samples:
            if samples % divisor == 0:
                size, steps = samples // divisor, plan.steps * divisor
                yield f"--batch_size {size} and gradient_accumulation_steps: {steps}", _split(size, steps)
            divisor *= 2
    if plan.strategy not in ("ddp", "no_shard"):
        checkpointing = {"fsdp_activation_checkpointing": True, "fsdp_activation_checkpointing_mode": "selective"}
        yield (
            "fsdp_activation_checkpointing: true with fsdp_activation_checkpointing_mode: selective",
            _setting(**checkpointing),
        )
        yield "fsdp_activation_checkpointing: true", _setting(fsdp_activation_checkpointing=True)
    if set(plan.coordinates) == {"dp_shard"}:
        processes = 2 * plan.processes
        yield f"--num_processes {processes}", _setting(num_processes=processes)


def _setting(**values: Any) -> Callable[[PlanRequest], PlanRequest]:
    return lambda given: replace(given, settings=with_values(given.settings, values))


def _split(batch_size: int, steps: int) -> Callable[[PlanRequest], PlanRequest]:
    def change(request: PlanRequest) -> PlanRequest:
        settings = with_values(request.settings, {"gradient_accumulation_steps": steps})
        return replace(request, settings=settings, batch_size=batch_size)

    return change


def with_values(settings: Resolution, values: Mapping[str, Any]) -> Resolution:
    """Return the settings as if these values had been given on the command line."""
    changed = {
        name: replace(settings.settings[name], value=value, source=Source.COMMAND_LINE, where=f"--{name} {value}")
        for name, value in values.items()
    }
    return replace(settings, settings={**settings.settings, **changed})

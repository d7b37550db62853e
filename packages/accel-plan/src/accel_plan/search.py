"""``accel plan --auto``: the configuration with the shortest step for a number of devices.

All configurations are estimated, which puts them in an order and leaves out those that are far too large. The first
ones are planned like any other configuration, and their plans are compared. The answer does not depend on the speed of
the machine that searches, and is the same each time.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from accel_state.errors import ConfigurationError

from .candidates import AXES, FULL, NONE, Candidate, candidates, shape_of
from .changes import with_values
from .estimates import Estimates
from .plan import PlanRequest, RankPlan, make_plan

SHOWN = 5
_PLANNED, _PLANNED_ALIKE = 6, 3
"""Number of configurations that are planned, and of those that differ in batches, sharding and checkpointing only."""
_PIPELINES, _PIPELINES_ALIKE = 3, 1
"""The same for pipelines, which come on top."""
_FASTER = 0.9
"""Estimated share of the best other step below which a pipeline is planned, which takes minutes."""
_TOO_LARGE = 1.15
"""Share of the memory from which an estimate leaves a configuration out."""


@dataclass(frozen=True)
class Choice:
    """A configuration that was planned."""

    candidate: Candidate
    plan: RankPlan

    @property
    def seconds(self) -> float:
        """Of a step."""
        assert self.plan.time is not None
        return self.plan.time.seconds


@dataclass(frozen=True)
class Rejected:
    """A configuration that one would think of, and why it is not among the best."""

    description: str
    reason: str


@dataclass(frozen=True)
class Found:
    """The result of a search.

    Attributes:
        request: what was asked for, with the number of processes in its settings.
        samples: of an optimizer step of all ranks.
        searched: number of configurations.
        too_large: those of them that an estimate left out.
        planned: those that were planned.
        best: those that fit, the fastest first; at most :data:`SHOWN`.
        others: what else one would think of.
    """

    request: PlanRequest
    samples: int
    searched: int
    too_large: int
    planned: int
    best: tuple[Choice, ...]
    others: tuple[Rejected, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return all values, for JSON."""
        best = [{"settings": choice.candidate.values(), **choice.plan.as_dict()} for choice in self.best]
        others = [vars(item) for item in self.others]
        numbers = {name: getattr(self, name) for name in ("samples", "searched", "too_large", "planned")}
        return {**numbers, "best": best, "others": others}


def search(request: PlanRequest, global_batch_tokens: int) -> Found:
    """Search the configuration with the shortest step.

    Args:
        request: with hardware, the memory of a device, and tokens per sample; its settings give the number of
            processes. What the search decides is replaced in them.
        global_batch_tokens: tokens of an optimizer step of all ranks.

    Raises:
        ConfigurationError: no size divides the batch, nothing fits, or the model does not tell its sizes.
    """
    hardware, limit, length = request.hardware, request.memory_limit, request.seq_length
    if hardware is None or limit is None or length is None:
        raise ValueError("a search needs hardware, a memory limit and a sequence length")
    _check(request)
    processes, samples = int(request.settings["num_processes"]), _samples(global_batch_tokens, length)
    shape = shape_of(request)
    every = list(candidates(request, shape, hardware, processes, samples, length))
    if not every:
        raise ConfigurationError(
            f"--global_batch_tokens {global_batch_tokens}: {samples:,} samples of {length:,} tokens cannot be divided "
            f"over {processes:,} devices by any mesh. Choose a multiple of {processes * length}."
        )
    estimates = Estimates(request, shape, hardware, length, every[0].precision)
    every.sort(key=lambda item: (estimates.seconds(item), estimates.bytes(item), item.describe()))
    made = _Search(request, every, estimates, limit)
    made.plan_first()
    best = sorted(made.fitting(), key=lambda choice: choice.seconds)[:SHOWN]
    if not best:
        raise ConfigurationError(made.nothing_fits())
    number, too_large = len(made.choices) + len(made.refused), len(every) - len(made.possible)
    return Found(request, samples, len(every), too_large, number, tuple(best), tuple(made.others(best)))


def planning_request(request: PlanRequest, candidate: Candidate) -> PlanRequest:
    """Return what :func:`~.plan.make_plan` takes for a configuration."""
    changed: dict[str, Any] = {"batch_size": candidate.batch_size}
    if candidate.axes["pp"] > 1:
        changed |= {"schedule": candidate.schedule, "num_microbatches": candidate.micro_batches}
    return replace(request, settings=with_values(request.settings, candidate.values()), **changed)


def reason(better: Choice, worse: Choice) -> str:
    """Return how much faster the better of two is, and what takes longer in the other."""
    assert better.plan.time is not None and worse.plan.time is not None
    first, second = better.plan.time.parts, worse.plan.time.parts
    longer = {name: second.get(name, 0.0) - first.get(name, 0.0) for name in {*first, *second}}
    name, seconds = max(longer.items(), key=lambda item: (item[1], item[0]))
    total = worse.seconds - better.seconds
    if total <= 0.0005 * better.seconds:
        return "as fast as the next"
    return f"{total:.3f} s less than the next, which takes {seconds:.3f} s more in {name}"


def _check(request: PlanRequest) -> None:
    settings = request.settings
    for name in ("use_deepspeed", "use_megatron_lm", "strategy"):
        if settings[name]:
            raise ConfigurationError(f"{settings.where(name)}: --auto searches DDP, FSDP 2 and meshes. Leave it out.")
    if settings["mixed_precision"] == "fp8":
        raise ConfigurationError(
            f"{settings.where('mixed_precision')}: --auto does not search in fp8, because not every mesh takes it. "
            "Search with bf16, and plan the best with --mixed_precision fp8."
        )


def _samples(tokens: int, length: int) -> int:
    samples, rest = divmod(tokens, length)
    if rest or not samples:
        nearest = " or ".join(str(count * length) for count in (samples, samples + 1) if count)
        raise ConfigurationError(
            f"--global_batch_tokens {tokens}: not a multiple of {length}, the tokens of a sample. Nearest: {nearest}."
        )
    return samples


@contextmanager
def _frozen() -> Iterator[None]:
    """Leave existing objects (libraries, earlier plans) out of the block's garbage collections."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


class _Search:
    """The configurations, the fastest first by the estimate, and the plans of the first ones.

    Attributes:
        possible: those that an estimate does not leave out.
        choices: those that were planned.
        refused: the reasons of those that cannot be, by their descriptions.
    """

    def __init__(self, request: PlanRequest, every: Sequence[Candidate], estimates: Estimates, limit: int) -> None:
        self.request, self.every, self.estimates, self.limit = request, every, estimates, limit
        self.possible = [item for item in every if estimates.bytes(item) <= _TOO_LARGE * limit]
        self.choices: list[Choice] = []
        self.refused: dict[str, str] = {}

    def fitting(self) -> list[Choice]:
        """Return what fits of what was planned."""
        return [choice for choice in self.choices if choice.plan.needed <= self.limit]

    def plan_first(self) -> None:
        """Plan the first configurations."""
        alike: Counter[tuple[int, ...]] = Counter()
        errors: dict[tuple[str, int], float] = {}  # of the estimates of memory, where one was planned
        counts = Counter[bool]()
        # Those of pipelines take longest to make, so they are made last, and only where they may be faster.
        for candidate in sorted(self.possible, key=lambda item: item.axes["pp"] > 1):
            pipeline = candidate.axes["pp"] > 1
            if pipeline and not self._may_be_faster(candidate):
                continue
            number, alike_number = (_PIPELINES, _PIPELINES_ALIKE) if pipeline else (_PLANNED, _PLANNED_ALIKE)
            if counts[pipeline] >= (number if self.fitting() else 3 * _PLANNED):
                continue
            size, kind = self.estimates.bytes(candidate), (candidate.checkpointing, candidate.axes["tp"])
            if alike[candidate.family] >= alike_number or size * errors.get(kind, 0.0) > self.limit:
                continue
            counts[pipeline] += 1
            try:
                with _frozen():
                    plan = replace(make_plan(planning_request(self.request, candidate)), operations=(), step=None)
            except ConfigurationError as error:
                self.refused[candidate.describe()] = str(error)
                continue
            if plan.peak is None or plan.time is None:
                self.refused[candidate.describe()] = f"its step {plan.unfollowed or plan.untimed} is not modelled"
                continue
            alike[candidate.family] += plan.needed <= self.limit
            errors[kind] = plan.needed / size
            self.choices.append(Choice(candidate, plan))

    def _may_be_faster(self, candidate: Candidate) -> bool:
        others = [choice for choice in self.fitting() if choice.candidate.axes["pp"] == 1]
        best = min(others, key=lambda choice: choice.seconds, default=None)
        seconds = self.estimates.seconds
        return best is None or seconds(candidate) < _FASTER * seconds(best.candidate)

    def nothing_fits(self) -> str:
        """Return an error's text for a search without a configuration that fits."""
        if not self.choices and self.refused:
            reasons = "; ".join(f"{key}: {text}" for key, text in self.refused.items())
            return f"none of the configurations is possible: {reasons}"
        smallest = min(self.every, key=lambda item: (self.estimates.bytes(item), item.describe()))
        size, about, what = self.estimates.bytes(smallest), "about ", smallest
        if self.choices:
            choice = min(self.choices, key=lambda item: item.plan.needed)
            size, about, what = choice.plan.needed, "", choice.candidate
        return (
            f"no configuration fits in {self.limit / 2**30:.1f} GiB: the nearest, {what.describe()}, needs {about}"
            f"{size / 2**30:.1f} GiB. Take more devices or larger ones, or shorter samples."
        )

    def others(self, best: Sequence[Choice]) -> list[Rejected]:
        """Return the fastest of each kind that is not among the best."""
        kinds = {
            "DDP": lambda item: all(item.axes[axis] == 1 for axis in AXES[1:]),
            "FSDP alone, without checkpointing": lambda item: _only_sharded(item) and item.checkpointing == NONE,
            "FSDP alone, with full checkpointing": lambda item: _only_sharded(item) and item.checkpointing == FULL,
            "FSDP in each node (HSDP)": lambda item: item.split == item.sequence == 1 < item.shards < _data_ranks(item),
            "tensor parallelism": lambda item: item.axes["tp"] > 1 and item.axes["pp"] == item.sequence == 1,
            "context parallelism": lambda item: item.axes["cp"] > 1,
            "sequence parallelism by heads": lambda item: item.axes["sp"] > 1,
            "a pipeline": lambda item: item.axes["pp"] > 1,
        }
        others = []
        for kind, belongs in kinds.items():
            those = [item for item in self.every if belongs(item)]
            if those and not any(belongs(choice.candidate) for choice in best):
                # The first one that is possible, or else the smallest.
                fitting = [item for item in self.possible if belongs(item)]
                item = fitting[0] if fitting else min(those, key=self.estimates.bytes)
                why = self._why_not(item, best[0].candidate)
                others.append(Rejected(f"{kind}: {item.describe()}", why))
        return others

    def _why_not(self, item: Candidate, best: Candidate) -> str:
        if item.describe() in self.refused:
            return self.refused[item.describe()]
        for choice in self.choices:
            if choice.candidate == item:
                if choice.plan.needed <= self.limit:
                    return f"{choice.seconds:.3f} s"
                return f"does not fit: needs {choice.plan.needed / 2**30:.1f} GiB"
        if item not in self.possible:
            return f"does not fit: {self.estimates.bytes(item) / 2**30:,.0f} GiB by the estimate"
        times = self.estimates.seconds(item) / self.estimates.seconds(best)
        return f"{times:.2f} times the step of the best, by the estimate"


def _only_sharded(item: Candidate) -> bool:
    return item.split == item.sequence == item.axes["dp_replicate"] == 1 < item.axes["dp_shard"]


def _data_ranks(item: Candidate) -> int:
    return item.axes["dp_replicate"] * item.axes["dp_shard"]

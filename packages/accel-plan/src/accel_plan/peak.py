"""The peak of a step's memory, also of models with more blocks than were traced."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate, groupby

from .memory import CATEGORIES, CLIPPING, STEP, Event, Group, Moment, Snapshot, StepMemory

SHOWN_TENSORS = 10
_WHOLE_MODEL = (CLIPPING, STEP)
"""Phases that are not ordered by blocks."""


@dataclass(frozen=True)
class PeakTensors:
    """Equal tensors that are alive at the peak."""

    group: Group
    count: int

    @property
    def bytes(self) -> int:
        """Of all of them."""
        return self.group.bytes * self.count

    def describe(self) -> str:
        """Return their number, dtype and shape."""
        return f"{self.count} x {self.group.dtype} [{', '.join(map(str, self.group.shape))}]"


@dataclass(frozen=True)
class PeakMemory:
    """The largest memory of a step after the first one, in bytes."""

    total: int
    moment: Moment
    categories: Mapping[str, int]
    tensors: tuple[PeakTensors, ...]  # the largest, at most SHOWN_TENSORS
    phases: Mapping[str, int]  # the largest memory in each
    between_steps: int


def size_of(snapshot: Snapshot) -> int:
    """Return the bytes of all tensors."""
    return sum(group.bytes * count for group, count in snapshot.items())


def instants(step: StepMemory) -> Iterable[tuple[Moment, int]]:
    """Yield each moment of a step, and the bytes that are alive."""
    total = size_of(step.start)
    for event in step.events:
        total += event.group.bytes * event.count
        yield event.moment, total


def peak_of(step: StepMemory) -> PeakMemory:
    """Return the peak of a step."""
    between = size_of(step.start)
    best, when, moment, phases = between, -1, Moment("between steps", "", ""), dict[str, int]()
    for index, (now, total) in enumerate(instants(step)):
        phases[now.phase] = max(phases.get(now.phase, 0), total)
        if total > best:
            best, when, moment = total, index, now
    alive = Counter(step.start)
    for event in step.events[: when + 1]:
        alive[event.group] += event.count
    categories = dict.fromkeys(CATEGORIES, 0)
    for group, count in alive.items():
        categories[group.category] += group.bytes * count
    groups = [PeakTensors(group, count) for group, count in alive.items() if count]
    largest = sorted(groups, key=lambda item: (-item.bytes, item.group.module, item.group.operation, item.group.shape))
    return PeakMemory(best, moment, categories, tuple(largest[:SHOWN_TENSORS]), phases, between)


def more_blocks(smaller: StepMemory, larger: StepMemory, blocks: int, steps: int) -> StepMemory | None:
    """Return a step of a model with ``steps`` blocks more, in each stage of a pipeline.

    Args:
        smaller: of the model with ``blocks - 1`` blocks in a stage.
        larger: of the model with ``blocks`` blocks in a stage, of which the last but one is repeated.
        blocks: at least 3, so that the repeated block has one before and one after it.
        steps: how many times.

    Returns:
        None if the larger model without that block is not the smaller one, so that blocks differ.
    """
    without = _repeated(smaller, larger, blocks, -1)
    found, expected = peak_of(without), peak_of(smaller)
    if found.phases != expected.phases or found.between_steps != expected.between_steps:
        return None
    return _repeated(smaller, larger, blocks, steps)


def _repeated(smaller: StepMemory, larger: StepMemory, blocks: int, steps: int) -> StepMemory:
    start = _extended(smaller.start, larger.start, steps)
    events: list[Event] = []
    now, snapshots = Counter(start), [_snapshots(smaller), _snapshots(larger)]
    for (phase, middle), run in groupby(larger.events, lambda event: _part_of(event, blocks)):
        if phase not in _WHOLE_MODEL:
            added = list(run) * (1 + steps if middle else 1)
        else:
            moment, _ = snapshots[1][phase]
            added, before = [], now
            for position in range(2):
                target = _extended(snapshots[0][phase][1][position], snapshots[1][phase][1][position], steps)
                added += _jump(before, target, moment)
                before = Counter(target)
        for event in added:
            now[event.group] += event.count
        events += added
    return StepMemory(start, tuple(events))


def _part_of(event: Event, blocks: int) -> tuple[str, bool]:
    """Return the phase if it is one of the whole model, and whether the event belongs to the block that is repeated."""
    if event.moment.phase in _WHOLE_MODEL:
        return event.moment.phase, False
    return "", event.block is not None and event.block % blocks == blocks - 2


def _snapshots(step: StepMemory) -> dict[str, tuple[Moment, tuple[Snapshot, Snapshot]]]:
    """Of each phase of the whole model: the moment of its peak, and what is alive then and at its end."""
    found: dict[str, tuple[Moment, tuple[Snapshot, Snapshot]]] = {}
    now = Counter(step.start)
    for phase, run in groupby(step.events, lambda event: event.moment.phase):
        events = list(run)
        changes = list(accumulate(event.group.bytes * event.count for event in events))
        when, alive = changes.index(max(changes)), now.copy()
        for index, event in enumerate(events):
            now[event.group] += event.count
            if index == when:
                alive = now.copy()
        if phase in _WHOLE_MODEL:
            found[phase] = events[when].moment, (alive, now.copy())
    return found


def _extended(first: Snapshot, second: Snapshot, steps: int) -> Snapshot:
    counts = {
        group: second.get(group, 0) + steps * (second.get(group, 0) - first.get(group, 0))
        for group in {**second, **first}
    }
    return {group: count for group, count in counts.items() if count}


def _jump(before: Snapshot, after: Snapshot, moment: Moment) -> list[Event]:
    changes = {group: after.get(group, 0) - before.get(group, 0) for group in {**before, **after}}
    ordered = sorted((item for item in changes.items() if item[1]), key=lambda item: item[1] > 0)
    return [Event(None, moment, group, count) for group, count in ordered]

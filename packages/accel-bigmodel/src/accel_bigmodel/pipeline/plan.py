"""Who computes which calls, and which results go from stage to stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from accel_state.errors import ConfigurationError

from .recording import Recording, Value


@dataclass(frozen=True)
class Plan:
    """How one model is shared by the stages of a pipeline.

    Attributes:
        units: names of the modules that are run whole.
        calls: the unit of every call, in the order of the forward.
        starts: for every stage, its first call.
        carries: for every stage but the last, the results that it hands to the next one.
        rewritten: results that the code between the units changes in place.
        kept: for every stage, the parameters and buffers that the code between the units needs there.
        touched: parameters and buffers that the code between the units uses at all.
    """

    units: tuple[str, ...]
    calls: tuple[str, ...]
    starts: tuple[int, ...]
    carries: tuple[tuple[Value, ...], ...]
    rewritten: frozenset[Value]
    kept: tuple[frozenset[str], ...]
    touched: frozenset[str]

    def last_call(self, stage: int) -> int:
        """The number of the last call of a stage."""
        return (self.starts[stage + 1] if stage + 1 < len(self.starts) else len(self.calls)) - 1

    def split_points(self) -> list[str]:
        """The units at which the stages after the first begin."""
        return [self.calls[start] for start in self.starts[1:]]


def make_plan(recording: Recording, units: Mapping[str, nn.Module], starts: Sequence[int]) -> Plan:
    """The plan for stages that begin at the given calls."""
    stages = [sum(start <= call for start in starts) - 1 for call in range(len(recording.calls))]
    needed = _needed(recording, stages, len(starts))
    carries = [
        sorted(
            value
            for value in set().union(*needed[stage + 1 :])
            if not isinstance(value, str) and stages[value[0]] <= stage
        )
        for stage in range(len(starts) - 1)
    ]
    return Plan(
        units=tuple(units),
        calls=tuple(recording.calls),
        starts=tuple(starts),
        carries=tuple(map(tuple, carries)),
        rewritten=frozenset(recording.rewritten),
        kept=tuple(frozenset(source for source in sources if isinstance(source, str)) for sources in needed),
        touched=frozenset(recording.touched),
    )


def _needed(recording: Recording, stages: Sequence[int], count: int) -> list[set[Value | str]]:
    """For every stage, the results and weights that its calls, and the code before them, read."""
    needed: list[set[Value | str]] = [set() for _ in range(count)]
    for call, sources in enumerate(recording.inputs):
        needed[stages[call]] |= sources
    for position, sources in recording.read:
        # Every stage runs the code between the units up to its last call; the last one also what comes after all calls.
        for stage in range(stages[min(position, len(stages) - 1)], count):
            needed[stage] |= sources
    needed[-1] |= recording.output
    return needed


def starts_at(calls: Sequence[str], split_points: Sequence[str], inside: Mapping[str, set[str]]) -> list[int]:
    """The first call of every stage, where the user says at which modules stages begin.

    Args:
        calls: the unit of every call.
        split_points: names of modules.
        inside: for every split point, the units that are it or in it.

    Raises:
        ConfigurationError: a split point is never called, or not after the one before it.
    """
    starts = [0]
    for point in split_points:
        first = next((call for call, name in enumerate(calls) if name in inside[point]), None)
        if first is None:
            raise ConfigurationError(
                f"split_points names {point!r}, which the forward does not call with the example inputs. Leave it out."
            )
        if first <= starts[-1]:
            raise ConfigurationError(
                f"split_points={list(split_points)!r}: {point!r} is not called after what begins the stage before it. "
                "Give the modules in "
                f"the order in which the forward calls them, without the first one ({calls[0]!r})."
            )
        starts.append(first)
    return starts


def balanced_starts(weights: Sequence[int], count: int) -> list[int]:
    """The first call of every stage, such that the largest stage is as small as it can be.

    Args:
        weights: bytes of every call, in order.
        count: number of stages, at most ``len(weights)``.
    """
    low, high = max(weights), sum(weights)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(_fill(weights, middle)) <= count else (middle + 1, high)
    starts = _fill(weights, low)
    while len(starts) < count:
        starts = _halve_largest(weights, starts)
    return starts


def _fill(weights: Sequence[int], capacity: int) -> list[int]:
    starts, room = [0], capacity
    for call, weight in enumerate(weights):
        if weight > room:
            starts.append(call)
            room = capacity
        room -= weight
    return starts


def _halve_largest(weights: Sequence[int], starts: list[int]) -> list[int]:
    ends = [*starts[1:], len(weights)]
    _, begin, end = max((sum(weights[a:b]), a, b) for a, b in zip(starts, ends, strict=True) if b - a > 1)
    middle = min(range(begin + 1, end), key=lambda cut: max(sum(weights[begin:cut]), sum(weights[cut:end])))
    return sorted([*starts, middle])

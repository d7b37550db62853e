"""Splits a model into the stages of a pipeline: who computes which calls, and which results travel between stages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from accel_state.errors import ConfigurationError
from accel_state.operations import get_data_structure, recursively_apply

from .recording import INPUT, Recording, Value, record

_CONTAINERS = (nn.ModuleList, nn.ModuleDict)


@dataclass(frozen=True)
class PipelineSplit:
    """How a model is split into stages.

    A unit is a module that runs on one rank. The code outside the units runs on every rank.
    """

    units: tuple[str, ...]  # names of the units
    calls: tuple[str, ...]  # the unit of every call, in the order of the forward
    starts: tuple[int, ...]  # for every stage, the number of its first call
    carries: tuple[tuple[Value, ...], ...]  # for every stage but the last, the results that it sends to the next one
    rewritten: frozenset[Value]  # results that code outside the units modifies in place
    # for every stage, the parameters and buffers that code outside the units needs there
    kept: tuple[frozenset[str], ...]
    touched: frozenset[str]  # parameters and buffers that code outside the units uses on any rank
    example: str  # the structure of the recorded inputs
    # for every call on the example, its output with a TensorInformation in place of each tensor
    outputs: tuple[Any, ...]
    inputs: frozenset[int]  # inputs, by number, that stages after the first read
    kind: str  # of the inputs of the example, as kind_of has it

    def __len__(self) -> int:
        return len(self.starts)

    def end(self, stage: int) -> int:
        """Return the number of the call after the last one of a stage."""
        return self.starts[stage + 1] if stage + 1 < len(self.starts) else len(self.calls)

    def modules_of(self, stage: int) -> set[str]:
        """Return the units that a stage calls."""
        return set(self.calls[self.starts[stage] : self.end(stage)])

    def split_points(self) -> list[str]:
        """Return the units at which the stages after the first begin."""
        return [self.calls[start] for start in self.starts[1:]]


def kind_of(inputs: Any) -> str:
    """Equal for inputs of equal structure, shapes and types, whatever their batch size."""
    return repr(recursively_apply(lambda tensor: (tensor.dtype, tensor.ndim, tensor.shape[1:]), inputs))


def structure_key(args: Any, kwargs: Any) -> str:
    """Equal for inputs of equal structure, shapes and types; the order of keyword arguments does not matter."""
    return repr(get_data_structure((args, dict(sorted(kwargs.items())))))


def split_model(
    model: nn.Module,
    forward: Callable[..., Any],
    split_points: str | Sequence[str] | None,
    no_split: Sequence[str] | None,
    example: tuple[Any, Any],
    count: int,
) -> PipelineSplit:
    """Split a model into ``count`` stages."""
    if split_points != "auto" and split_points is not None:
        points = _check_points(split_points, count)
        units = choose_units(model, _blocks(model, no_split), points)
        recording = record(model, forward, units, *example)
        inside = {}
        for point in points:
            modules = set(map(id, model.get_submodule(point).modules()))
            inside[point] = {name for name, unit in units.items() if id(unit) in modules}
        return _make_split(recording, units, _starts_at(recording.calls, points, inside), example)
    # Without explicit classes, the assumed blocks are split when there are too few of them.
    attempts = [set(no_split)] if no_split is not None else [_blocks(model, None), set[str]()]
    for classes in attempts:
        units = choose_units(model, classes, ())
        recording = record(model, forward, units, *example)
        if len(recording.calls) >= count:
            sizes = [sum(item.nbytes for item in model.get_submodule(name).parameters()) for name in recording.calls]
            return _make_split(recording, units, balanced_starts(sizes, count), example)
    raise ConfigurationError(
        f"{type(model).__name__} has fewer consecutive module calls than the {count} processes of this run. "
        f"Start fewer processes{', or name fewer classes in no_split_module_classes' if no_split else ''}."
    )


def _blocks(model: nn.Module, no_split: Sequence[str] | None) -> set[str]:
    if no_split is not None:
        return set(no_split)
    declared = {name for module in model.modules() for name in getattr(module, "_no_split_modules", None) or ()}
    if declared:
        return declared
    # Classes that occur several times in a list or sequence: the layers of most models.
    classes: set[str] = set()
    for module in model.modules():
        if isinstance(module, (*_CONTAINERS, nn.Sequential)):
            nested = [child for child in module.children() if next(child.children(), None) is not None]
            counts = Counter(type(child).__name__ for child in nested)
            classes |= {name for name, count in counts.items() if count > 1}
    return classes


def choose_units(model: nn.Module, no_split: Collection[str], split_points: Sequence[str]) -> dict[str, nn.Module]:
    """Return the outermost modules that are of a class in ``no_split`` or have no children, by name.

    A module that contains a split point is always split. Modules without parameters that hold buffers (tables of rotary
    positions, say) are not units: every stage computes them, instead of receiving their results.
    """
    for name in split_points:
        try:
            model.get_submodule(name)
        except AttributeError:
            known = [known for known, _ in model.named_modules() if known]
            raise ConfigurationError(
                f"split_points names {name!r}, which is not a submodule of {type(model).__name__}. Its submodules are "
                f"{', '.join(known[:12])}{', ...' if len(known) > 12 else ''}; print(model) shows all of them."
            ) from None
    units: dict[str, nn.Module] = {}

    def visit(module: nn.Module, name: str) -> None:
        children = list(module.named_children())
        holds_split_point = not name or any(point.startswith(f"{name}.") for point in split_points)
        is_whole = type(module).__name__ in no_split or not children
        if holds_split_point or not is_whole or isinstance(module, _CONTAINERS):
            for child_name, child in children:
                visit(child, f"{name}.{child_name}" if name else child_name)
            return
        is_table = not any(True for _ in module.parameters()) and any(True for _ in module.buffers())
        # A module that is registered under several names is one unit.
        if (name in split_points or not is_table) and all(known is not module for known in units.values()):
            units[name] = module

    visit(model, "")
    return units


def _make_split(
    recording: Recording, units: Mapping[str, nn.Module], starts: Sequence[int], example: tuple[Any, Any]
) -> PipelineSplit:
    stages = [sum(start <= call for start in starts) - 1 for call in range(len(recording.calls))]
    needed = _needed(recording, stages, len(starts))
    carries = []
    for stage in range(len(starts) - 1):
        later = set().union(*needed[stage + 1 :])
        results = (v for v in later if not isinstance(v, str) and v[0] != INPUT)
        carries.append(tuple(sorted(v for v in results if stages[v[0]] <= stage)))
    later = set().union(*needed[1:])
    return PipelineSplit(
        units=tuple(units),
        calls=tuple(recording.calls),
        starts=tuple(starts),
        carries=tuple(carries),
        rewritten=frozenset(recording.rewritten),
        kept=tuple(frozenset(source for source in sources if isinstance(source, str)) for sources in needed),
        touched=frozenset(recording.touched),
        example=structure_key(*example),
        outputs=tuple(recording.outputs),
        inputs=frozenset(v[1] for v in later if not isinstance(v, str) and v[0] == INPUT),
        kind=kind_of(example),
    )


def _needed(recording: Recording, stages: Sequence[int], count: int) -> list[set[Value | str]]:
    """For every stage, the results and weights that its calls and the code before them read."""
    needed: list[set[Value | str]] = [set() for _ in range(count)]
    for call, sources in enumerate(recording.inputs):
        needed[stages[call]] |= sources
    for position, sources in recording.read:
        # Every stage runs the code outside the units up to its last call; the last stage runs it to the end.
        for stage in range(stages[min(position, len(stages) - 1)], count):
            needed[stage] |= sources
    needed[-1] |= recording.output
    return needed


def _starts_at(calls: Sequence[str], split_points: Sequence[str], inside: Mapping[str, set[str]]) -> list[int]:
    """Return the first call of every stage, from the split points and the units that each one contains."""
    starts = [0]
    for point in split_points:
        first = next((call for call, name in enumerate(calls) if name in inside[point]), None)
        if first is None:
            raise ConfigurationError(
                f"split_points names {point!r}, which the forward does not call with the example inputs. Leave it out."
            )
        if first <= starts[-1]:
            raise ConfigurationError(
                f"split_points={list(split_points)!r}: {point!r} is not called after the start of the previous stage. "
                f"List the modules in the order of their calls, without the first one ({calls[0]!r})."
            )
        starts.append(first)
    return starts


def balanced_starts(sizes: Sequence[int], count: int) -> list[int]:
    """Return the first call of every stage, such that the largest stage is as small as possible."""
    low, high = max(sizes), sum(sizes)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(_fill(sizes, middle)) <= count else (middle + 1, high)
    starts = _fill(sizes, low)
    while len(starts) < count:
        ends = [*starts[1:], len(sizes)]
        spans = [(sum(sizes[a:b]), a, b) for a, b in zip(starts, ends, strict=True) if b - a > 1]
        _, begin, end = max(spans)
        cuts = {cut: max(sum(sizes[begin:cut]), sum(sizes[cut:end])) for cut in range(begin + 1, end)}
        starts = sorted([*starts, min(cuts, key=lambda cut: cuts[cut])])
    return starts


def _fill(sizes: Sequence[int], capacity: int) -> list[int]:
    starts, room = [0], capacity
    for call, size in enumerate(sizes):
        if size > room:
            starts.append(call)
            room = capacity
        room -= size
    return starts


def _check_points(split_points: str | Sequence[str], count: int) -> list[str]:
    if isinstance(split_points, str):
        raise ConfigurationError(
            f"split_points={split_points!r} must be 'auto' or a list of names of modules, such as [{split_points!r}]."
        )
    points = list(split_points)
    if len(points) != count - 1:
        raise ConfigurationError(
            f"split_points={points!r} makes {len(points) + 1} stages, and this run has {count} processes. Name "
            f"{count - 1} module(s), or start {len(points) + 1} processes."
        )
    return points

"""From a model and an example to the plan of its pipeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from accel_state.errors import AccelError, ConfigurationError
from accel_state.state import PartialState

from .plan import Plan, balanced_starts, make_plan, starts_at
from .recording import Recording, record
from .units import choose_units, declared_blocks, repeated_blocks


def agree_on_plan(make: Callable[[], Plan]) -> Plan:
    """Make the plan on the first rank, and tell it to the others.

    Raises:
        ConfigurationError: it cannot be made; on every rank.
    """
    collectives = PartialState().collectives
    found: Plan | Exception | None = None
    if collectives.rank == 0:
        try:
            found = make()
        except Exception as error:  # the others wait for an answer, whatever it is
            found = error
    told = collectives.broadcast_object(_as_text(found))
    if isinstance(found, Exception):
        raise found
    if isinstance(told, str):
        raise ConfigurationError(told)
    return told  # type: ignore[return-value]


def _as_text(found: Plan | Exception | None) -> Plan | str | None:
    if not isinstance(found, Exception):
        return found
    return (
        str(found)
        if isinstance(found, AccelError)
        else f"rank 0 could not split the model: {type(found).__name__}: {found}"
    )


def plan_of(
    model: nn.Module,
    forward: Callable[..., Any],
    split_points: str | Sequence[str] | None,
    whole: Sequence[str] | None,
    example: tuple[Any, Any],
    count: int,
) -> Plan:
    """Split a model into ``count`` stages.

    Args:
        model: the whole model, with its weights.
        forward: its forward.
        split_points: names of the modules at which the stages after the first begin, or "auto".
        whole: names of classes that are not split; None for those that the model declares, or its repeated layers.
        example: positional and keyword inputs to try it with.
        count: number of stages.

    Raises:
        ConfigurationError: the model cannot be split so, or its weights are on the meta device.
    """
    _check_has_weights(model)
    if split_points == "auto" or split_points is None:
        return _balanced(model, forward, whole, example, count)
    points = _check_points(split_points, count)
    units = choose_units(model, _blocks(model, whole), points)
    recording = record(model, forward, units, *example)
    inside = {point: _units_inside(model, units, point) for point in points}
    return make_plan(recording, units, starts_at(recording.calls, points, inside))


def _balanced(
    model: nn.Module, forward: Callable[..., Any], whole: Sequence[str] | None, example: tuple[Any, Any], count: int
) -> Plan:
    # Where the user names no classes, what we take for blocks is split when there are too few of them.
    attempts = [set(whole)] if whole is not None else [_blocks(model, None), set[str]()]
    for classes in attempts:
        units = choose_units(model, classes, ())
        recording = record(model, forward, units, *example)
        if len(recording.calls) >= count:
            return make_plan(recording, units, balanced_starts(_weights(model, recording), count))
    raise ConfigurationError(
        f"{type(model).__name__} has fewer parts to run one after the other than the {count} processes of this run. "
        "Start fewer processes"
        f"{', or name fewer classes in no_split_module_classes' if whole else ''}."
    )


def _blocks(model: nn.Module, whole: Sequence[str] | None) -> set[str]:
    return set(whole) if whole is not None else declared_blocks(model) or repeated_blocks(model)


def _weights(model: nn.Module, recording: Recording) -> list[int]:
    """Bytes of the weights that each call computes with: a measure of its work, and of what its stage must hold."""
    return [sum(tensor.nbytes for tensor in model.get_submodule(name).parameters()) for name in recording.calls]


def _units_inside(model: nn.Module, units: dict[str, nn.Module], point: str) -> set[str]:
    modules = {id(module) for module in model.get_submodule(point).modules()}
    return {name for name, unit in units.items() if id(unit) in modules}


def _check_points(split_points: str | Sequence[str], count: int) -> list[str]:
    if isinstance(split_points, str):
        raise ConfigurationError(
            f"split_points={split_points!r} must be 'auto' or a list of names of modules, such as [{split_points!r}]."
        )
    points = list(split_points)
    if len(points) != count - 1:
        raise ConfigurationError(
            f"split_points={points!r} makes {len(points) + 1} stages, and this run has {count} processes. Name "
            f"{count - 1} module(s), or "
            f"start {len(points) + 1} processes."
        )
    return points


def _check_has_weights(model: nn.Module) -> None:
    missing = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if tensor.is_meta]
    if missing:
        raise ConfigurationError(
            f"{len(missing)} tensors of the model have no values: they are on the meta device "
            f"({', '.join(missing[:3])}, ...). Load the "
            "weights before the model is split, with load_checkpoint_in_model for example."
        )

"""Checks of arguments where they are given, so that no library fails on a wrong one later. Torch-free."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, SupportsFloat

from .errors import ArgumentTypeError, ConfigurationError


def check_number(
    name: str,
    value: Any,
    *,
    at_least: float | None = None,
    above: float | None = None,
    below: float | None = None,
    whole: bool = False,
    infinite: bool = False,
) -> float:
    """Return a number within bounds.

    Args:
        name: the argument, for the message.
        value: a number, or what converts to one, such as a tensor of one element.
        at_least: the smallest allowed number.
        above: a bound that the number must exceed.
        below: a bound that the number must not reach.
        whole: whether it must be an integer; then one is returned.
        infinite: whether infinity is allowed.

    Raises:
        ArgumentTypeError: the value is not a number.
        ConfigurationError: NaN, or out of bounds.
    """
    bounds = [f"at least {at_least}"] if at_least is not None else []
    bounds += [f"above {above}"] if above is not None else []
    bounds += [f"below {below}"] if below is not None else []
    allowed = f"{'a whole' if whole else 'a'} number{' ' if bounds else ''}{' and '.join(bounds)}"
    if isinstance(value, (str, bytes, bool)) or not isinstance(value, SupportsFloat):
        raise ArgumentTypeError(f"{name}={value!r}, a {type(value).__name__}, must be {allowed}.")
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ArgumentTypeError(f"{name}={value!r} must be {allowed}: {error}.") from None
    fits = (at_least is None or number >= at_least) and (above is None or number > above)
    fits = fits and (below is None or number < below) and (infinite or not math.isinf(number))
    if math.isnan(number) or not fits or (whole and not number.is_integer()):
        raise ConfigurationError(f"{name}={value!r} must be {allowed}.")
    return int(value) if whole else number  # type: ignore[call-overload]


def check_rank(num_processes: int, process_index: int) -> None:
    """Raise ConfigurationError unless ``process_index`` is a rank in a world of ``num_processes``."""
    check_number("num_processes", num_processes, at_least=1, whole=True)
    check_number("process_index", process_index, whole=True)
    if not 0 <= process_index < num_processes:
        raise ConfigurationError(
            f"process_index={process_index} is not a rank of {num_processes} processes; it must be in "
            f"[0, {num_processes - 1}]"
        )


def check_flag(name: str, value: Any, or_none: bool = False) -> None:
    """Raise ArgumentTypeError for an argument that is neither True nor False (nor 1, 0, or if allowed None).

    The text "false" would count as true.
    """
    if value is True or value is False or (value is None and or_none) or (type(value) is int and value in (0, 1)):
        return
    raise ArgumentTypeError(f"{name}={value!r} must be {'True, False or None' if or_none else 'True or False'}.")


def check_flags(settings: Any) -> None:
    """Raise ArgumentTypeError if a field of a data class that is declared as a bool has another value.

    None is allowed where the declaration or the default has it.
    """
    for field in dataclasses.fields(settings):
        declared = str(field.type).replace(" ", "")
        if declared not in ("bool", "bool|None"):
            continue
        value = getattr(settings, field.name)
        if value is not True and value is not False:
            or_none = declared == "bool|None" or field.default is None
            check_flag(f"{type(settings).__name__}.{field.name}", value, or_none)

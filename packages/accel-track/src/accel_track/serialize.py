"""Conversion of values of any type to plain data that every back end can store."""

from __future__ import annotations

import dataclasses
import datetime
import math
import os
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from typing import Any

import torch

# Elements of an array or tensor that are stored individually; a larger one is stored as its shape and dtype.
MAX_ELEMENTS = 256
# Characters kept of an object's description.
MAX_TEXT = 10_000
# Bits of an integer stored as such: Python refuses to print more than 4300 digits, and back ends accept fewer.
_MAX_INT_BITS = 2**13
# Levels of nesting; deeper values are stored as text.
MAX_DEPTH = 40


def to_plain(value: Any) -> Any:
    """Convert a value to dictionaries with string keys, lists, strings, numbers, booleans and None. Never raises.

    Enum members with string or number values become these, other members ``Class.MEMBER``; functions, classes and
    modules their qualified names; paths, dates, torch dtypes and devices strings; data classes, named tuples and
    namespaces dictionaries; sets sorted lists; small tensors and arrays numbers or nested lists. A reference cycle
    becomes ``"<cycle>"``, anything else its ``repr``.
    """
    return _plain(value, ())


def _plain(value: Any, parents: tuple[int, ...]) -> Any:
    if type(value) is int and value.bit_length() > _MAX_INT_BITS:
        digits = hex(value)
        ellipsis = "..." if len(digits) > MAX_TEXT else ""
        return f"{digits[:MAX_TEXT]}{ellipsis} ({value.bit_length()} bits)"
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Enum):
        is_plain = isinstance(value, (str, int, float))
        return _plain(value.value, ()) if is_plain else f"{type(value).__name__}.{value.name}"
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    if id(value) in parents:
        return "<cycle>"
    if len(parents) >= MAX_DEPTH:
        return describe(value)
    try:
        for accepts, convert in _CONVERSIONS:
            if accepts(value):
                return convert(value, (*parents, id(value)))
    except Exception:
        # The object's own code failed: a property, an iterator, an array protocol. Its description is still useful.
        return describe(value)
    return describe(value)


def _is_fields(value: Any) -> bool:
    is_dataclass = dataclasses.is_dataclass(value) and not isinstance(value, type)
    return is_dataclass or isinstance(value, types.SimpleNamespace) or type(value).__name__ == "Namespace"


def _fields(value: Any) -> dict[Any, Any]:
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
    return dict(vars(value))


def _dictionary(items: Iterable[tuple[Any, Any]], parents: tuple[int, ...]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in items:
        name = key if type(key) is str else str(_plain(key, parents))
        # 1 and "1" are different keys of a dictionary.
        result[name if name not in result else f"{name} ({type(key).__name__})"] = _plain(value, parents)
    return result


def _list(items: Iterable[Any], parents: tuple[int, ...]) -> list[Any]:
    return [_plain(item, parents) for item in items]


def _sorted(items: Iterable[Any], parents: tuple[int, ...]) -> list[Any]:
    return sorted(
        _list(items, parents),
        key=lambda item: (type(item).__name__, item if isinstance(item, (int, float)) else 0, str(item)),
    )


def _tensor(value: torch.Tensor, parents: tuple[int, ...]) -> Any:
    if value.numel() > MAX_ELEMENTS or value.device.type == "meta":
        return f"tensor(shape={tuple(value.shape)}, dtype={_dtype(value.dtype)}, device={value.device})"
    return _plain(value.detach().tolist(), parents)


def _array(value: Any, parents: tuple[int, ...]) -> Any:
    if value.size > MAX_ELEMENTS:
        return f"array(shape={tuple(value.shape)}, dtype={value.dtype})"
    return _plain(value.tolist(), parents)


def _is_array(value: Any) -> bool:
    # Arrays and scalars of numpy and of libraries with its interface, without importing them.
    return all(hasattr(value, name) for name in ("tolist", "dtype", "shape", "size")) and not isinstance(value, type)


def _name_of(value: Any) -> str:
    return f"{value.__module__}.{value.__qualname__}" if getattr(value, "__module__", None) else str(value.__qualname__)


def _dtype(value: torch.dtype) -> str:
    return str(value).removeprefix("torch.")


_CONVERSIONS: tuple[tuple[Callable[[Any], bool], Callable[[Any, tuple[int, ...]], Any]], ...] = (
    (lambda v: isinstance(v, torch.Tensor), _tensor),
    (lambda v: isinstance(v, Mapping), lambda v, parents: _dictionary(v.items(), parents)),
    (
        lambda v: isinstance(v, tuple) and hasattr(v, "_asdict"),
        lambda v, parents: _dictionary(v._asdict().items(), parents),
    ),
    (lambda v: isinstance(v, (list, tuple)), _list),
    (lambda v: isinstance(v, (set, frozenset)), _sorted),
    (_is_fields, lambda v, parents: _dictionary(_fields(v).items(), parents)),
    (lambda v: isinstance(v, os.PathLike), lambda v, parents: _plain(os.fspath(v), parents)),
    (lambda v: callable(v) and hasattr(v, "__qualname__"), lambda v, parents: _name_of(v)),
    (lambda v: isinstance(v, types.ModuleType), lambda v, parents: v.__name__),
    (lambda v: isinstance(v, torch.dtype), lambda v, parents: _dtype(v)),
    (lambda v: isinstance(v, torch.device), lambda v, parents: str(v)),
    (lambda v: isinstance(v, (datetime.date, datetime.time)), lambda v, parents: v.isoformat()),
    (_is_array, _array),
    # pydantic models.
    (lambda v: callable(getattr(type(v), "model_dump", None)), lambda v, parents: _plain(v.model_dump(), parents)),
)


def describe(value: Any) -> str:
    """Return the shortened ``repr`` of an object, or its class if ``repr`` fails."""
    try:
        text = repr(value)
    except Exception:
        text = f"<{type(value).__module__}.{type(value).__qualname__}>"
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}... ({len(text)} characters)"


def flatten(values: Mapping[str, Any], separator: str = ".") -> dict[str, Any]:
    """Flatten a plain nested dictionary by joining keys with ``separator``; lists and empty dictionaries stay values.

    If two joined keys are equal, the second gets a number.
    """
    result: dict[str, Any] = {}
    for key, value in _leaves(values, "", separator):
        name, number = key, 2
        while name in result:
            name, number = f"{key}_{number}", number + 1
        result[name] = value
    return result


def _leaves(values: Mapping[str, Any], prefix: str, separator: str) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        name = f"{prefix}{separator}{key}" if prefix else str(key)
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, name, separator)
        else:
            yield name, value


def as_number(value: Any) -> int | float | None:
    """Return a number, boolean, or tensor or array of one element as a Python number; None for anything else.

    An integer beyond the range of floats becomes infinite, because back ends convert to floats.
    """
    if isinstance(value, (bool, int)):
        if abs(value) <= sys.float_info.max:
            return int(value)
        return math.inf if value > 0 else -math.inf
    if type(value) is float:
        return value
    if isinstance(value, float):
        return float(value)
    if (isinstance(value, torch.Tensor) and value.numel() == 1) or (_is_array(value) and value.size == 1):
        number = value.item()
        return as_number(number) if isinstance(number, (bool, int, float)) else None
    return None


def to_json(value: Any) -> Any:
    """Plain data as strict JSON: numbers that are not finite become "NaN", "Infinity" and "-Infinity"."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value).replace("nan", "NaN").replace("inf", "Infinity")
    if isinstance(value, dict):
        return {key: to_json(item) for key, item in value.items()}
    return [to_json(item) for item in value] if isinstance(value, list) else value

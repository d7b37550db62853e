"""Values of any kind, as the plain data that every back end can hold."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import math
import os
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from typing import Any

import torch

LARGEST_LIST = 256
"""Elements of an array or a tensor that are stored one by one; a larger one is described by its shape and type."""
LONGEST_TEXT = 10_000
"""Characters that are kept of the description of an object."""
_LONGEST_INTEGER = 2**13
"""Bits of an integer that is stored as such: Python refuses to write more than 4300 digits, and back ends read fewer.
"""
DEEPEST = 40
"""Levels of nesting; what lies deeper is stored as text."""

_CALLABLE = (
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    type,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
)


def to_plain(value: Any) -> Any:
    """A value as dictionaries with texts as keys, lists, texts, numbers, booleans and None.

    Enumerations of texts or numbers become these, others ``Class.MEMBER``; functions, classes and modules their full
    names; paths, dates and torch's dtypes and devices texts; data classes, named tuples and namespaces dictionaries;
    sets sorted lists; tensors and arrays numbers or nested lists while they are small. What contains itself is cut
    there with ``"<cycle>"``. Anything else becomes its ``repr``. Never raises.

    Args:
        value: anything.
    """
    return _plain(value, ())


def _plain(value: Any, above: tuple[int, ...]) -> Any:
    if type(value) is int and value.bit_length() > _LONGEST_INTEGER:
        return (
            f"{hex(value)[:LONGEST_TEXT]}{'...' if value.bit_length() > 4 * LONGEST_TEXT else ''} "
            f"({value.bit_length()} bits)"
        )
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Enum):
        return _enumeration(value)
    if isinstance(value, (bool, int, float, str)):
        return next(kind(value) for kind in (bool, int, float, str) if isinstance(value, kind))
    if id(value) in above:
        return "<cycle>"
    if len(above) >= DEEPEST:
        return describe(value)
    try:
        return _converted(value, (*above, id(value)))
    except Exception:
        # The object's own code failed: a property, an iterator, an array protocol. Its name is still worth keeping.
        return describe(value)


def _enumeration(value: Enum) -> Any:
    if isinstance(value, (str, int, float)):
        return _plain(value.value, ())
    return f"{type(value).__name__}.{value.name}"


def _converted(value: Any, above: tuple[int, ...]) -> Any:
    for accepts, convert in _CONVERSIONS:
        if accepts(value):
            return convert(value, above)
    return describe(value)


def _is_fields(value: Any) -> bool:
    is_dataclass = dataclasses.is_dataclass(value) and not isinstance(value, type)
    return is_dataclass or isinstance(value, types.SimpleNamespace) or type(value).__name__ == "Namespace"


def _fields(value: Any) -> dict[Any, Any]:
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
    return dict(vars(value))


def _dictionary(items: Iterable[tuple[Any, Any]], above: tuple[int, ...]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in items:
        name = key if type(key) is str else str(_plain(key, above))
        # 1 and "1" are two keys of a dictionary.
        result[name if name not in result else f"{name} ({type(key).__name__})"] = _plain(value, above)
    return result


def _list(items: Iterable[Any], above: tuple[int, ...]) -> list[Any]:
    return [_plain(item, above) for item in items]


def _sorted(items: Iterable[Any], above: tuple[int, ...]) -> list[Any]:
    return sorted(
        _list(items, above),
        key=lambda item: (type(item).__name__, item if isinstance(item, (int, float)) else 0, str(item)),
    )


def _tensor(value: torch.Tensor, above: tuple[int, ...]) -> Any:
    if value.numel() > LARGEST_LIST or value.device.type == "meta":
        return f"tensor(shape={tuple(value.shape)}, dtype={_dtype(value.dtype)}, device={value.device})"
    return _plain(value.detach().tolist(), above)


def _array(value: Any, above: tuple[int, ...]) -> Any:
    if value.size > LARGEST_LIST:
        return f"array(shape={tuple(value.shape)}, dtype={value.dtype})"
    return _plain(value.tolist(), above)


def _is_array(value: Any) -> bool:
    # Arrays and scalars of numpy, and of libraries with its interface, without an import of any.
    return all(hasattr(value, name) for name in ("tolist", "dtype", "shape", "size")) and not isinstance(value, type)


def _name_of(value: Any) -> str:
    return f"{value.__module__}.{value.__qualname__}" if getattr(value, "__module__", None) else str(value.__qualname__)


def _partial(value: Any, above: tuple[int, ...]) -> dict[str, Any]:
    return {
        "function": _plain(value.func, above),
        "args": _list(value.args, above),
        "kwargs": _dictionary(value.keywords.items(), above),
    }


def _dtype(value: torch.dtype) -> str:
    return str(value).removeprefix("torch.")


def _text_of_bytes(value: Any) -> str:
    return bytes(value[:LONGEST_TEXT]).decode(errors="backslashreplace")


_DATES = (datetime.date, datetime.time)
_CONVERSIONS: tuple[tuple[Callable[[Any], bool], Callable[[Any, tuple[int, ...]], Any]], ...] = (
    (lambda v: isinstance(v, torch.Tensor), _tensor),
    (lambda v: isinstance(v, Mapping), lambda v, above: _dictionary(v.items(), above)),
    (
        lambda v: isinstance(v, tuple) and hasattr(v, "_asdict"),
        lambda v, above: _dictionary(v._asdict().items(), above),
    ),
    (lambda v: isinstance(v, (list, tuple)), _list),
    (lambda v: isinstance(v, (set, frozenset)), _sorted),
    (_is_fields, lambda v, above: _dictionary(_fields(v).items(), above)),
    (lambda v: isinstance(v, os.PathLike), lambda v, above: _plain(os.fspath(v), above)),
    (lambda v: isinstance(v, functools.partial), _partial),
    (lambda v: isinstance(v, _CALLABLE), lambda v, above: _name_of(v)),
    (lambda v: isinstance(v, types.ModuleType), lambda v, above: v.__name__),
    (lambda v: isinstance(v, torch.dtype), lambda v, above: _dtype(v)),
    (lambda v: isinstance(v, torch.device), lambda v, above: str(v)),
    (lambda v: isinstance(v, _DATES), lambda v, above: v.isoformat()),
    (lambda v: isinstance(v, datetime.timedelta), lambda v, above: str(v)),
    (lambda v: isinstance(v, (bytes, bytearray)), lambda v, above: _text_of_bytes(v)),
    (_is_array, _array),
    # pydantic's models, and dictionary-like objects of configuration libraries.
    (lambda v: callable(getattr(type(v), "model_dump", None)), lambda v, above: _plain(v.model_dump(), above)),
    (lambda v: type(v).__name__ == "deque", _list),
)


def describe(value: Any) -> str:
    """The ``repr`` of an object, shortened; its class if it has none that works."""
    try:
        text = repr(value)
    except Exception:
        text = f"<{type(value).__module__}.{type(value).__qualname__}>"
    return text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]}... ({len(text)} characters)"


def flatten(values: Mapping[str, Any], separator: str = ".") -> dict[str, Any]:
    """A plain nested dictionary as one level, with the keys joined; lists stay as they are.

    Where two keys become one, the second gets a number. Empty dictionaries stay as values.

    Args:
        values: as :func:`to_plain` gives them.
        separator: put between keys.
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
    """A number, boolean, or tensor or array of one element as a Python number; None for anything else.

    An integer beyond the range of floats becomes infinite: back ends compute with what they are given.

    Args:
        value: a logged value.
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
    """Plain data as JSON can hold it in every reader: numbers that are not finite become "NaN", "Infinity" and
    "-Infinity".
    """
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {key: to_json(item) for key, item in value.items()}
    return [to_json(item) for item in value] if isinstance(value, list) else value

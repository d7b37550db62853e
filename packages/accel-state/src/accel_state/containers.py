"""Rebuilds containers (lists, tuples, mappings, data classes), and reaches into nested ones."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Iterable, Mapping
from typing import Any


def is_namedtuple(data: Any) -> bool:
    """Return True if the object is a named tuple (from collections or typing)."""
    return isinstance(data, tuple) and hasattr(data, "_asdict") and hasattr(data, "_fields")


def is_dataclass_instance(data: Any) -> bool:
    """Return True if the object is an instance of a data class (and not the class)."""
    return dataclasses.is_dataclass(data) and not isinstance(data, type)


def is_container(data: Any) -> bool:
    """Return True if the object is nested data rather than a leaf."""
    return isinstance(data, (tuple, list, Mapping)) or is_dataclass_instance(data)


def honor_type(obj: Any, generator: Iterable[Any]) -> Any:
    """Build an object of the type of ``obj`` (a list, tuple or named tuple) from the values of ``generator``.

    Raises:
        TypeError: the type is a tuple whose constructor does not take an iterable of its members.
    """
    if is_namedtuple(obj):
        return obj._make(generator)  # also if the class has a constructor of its own
    values = list(generator)
    if type(obj) is list:
        return values
    if isinstance(obj, list):
        new = copy.copy(obj)  # keeps the other attributes of a subclass, whatever its constructor takes
        new[:] = values
        return new
    return _construct(obj, values, "a tuple")


def rebuild_mapping(data: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """Return a mapping of the type of ``data`` with the same keys and new values.

    Raises:
        TypeError: the type has no ``__setitem__``, and its constructor does not take a dictionary of its items; or a
            copy shares its items with the original.
    """
    if type(data) is dict:
        return items
    if not hasattr(data, "__setitem__"):
        return _construct(data, items, "a dict")
    # A copy keeps the other attributes of a subclass (a default factory, a tokenizer's encodings, ...).
    new = _copy_mapping(data)
    for key, value in items.items():
        before = data[key]
        new[key] = value
        if value is not before and data[key] is value:
            data[key] = before
            raise TypeError(
                f"cannot make another {type(data).__name__} with new values: copy.copy() of it shares its items. Give "
                "it a method __copy__, or pass a dict instead."
            )
    return new


def _copy_mapping(data: Mapping[Any, Any]) -> Any:
    """Return a shallow copy with items of its own."""
    new = copy.copy(data)
    if not isinstance(data, dict) and not hasattr(type(data), "__copy__"):
        # The default copy shares the dictionary in which such a class keeps its items.
        for name, value in getattr(new, "__dict__", {}).items():
            if isinstance(value, dict | list):
                vars(new)[name] = copy.copy(value)
    return new


def _construct(obj: Any, members: Any, plain: str) -> Any:
    try:
        new = type(obj)(members)
    except Exception as error:
        raise _cannot_rebuild(obj, plain) from error
    # A constructor that takes something else may accept anything, and would lose the members.
    if len(new) != len(members) or (isinstance(obj, Mapping) and set(new) != set(members)):
        raise _cannot_rebuild(obj, plain)
    return new


def _cannot_rebuild(data: Any, plain: str) -> TypeError:
    return TypeError(
        f"cannot make another {type(data).__name__} with new values: its constructor does not take {plain} of its "
        f"members. Give it such a constructor, or pass {plain} instead."
    )


def rebuild_dataclass(data: Any, values: dict[str, Any]) -> Any:
    """Return an instance of ``data``'s data class with new values, also of frozen and ``init=False`` fields."""
    new = copy.copy(data)
    for name, value in values.items():
        object.__setattr__(new, name, value)
    return new


def recursive_getattr(obj: Any, attr: str) -> Any:
    """Get the attribute at a dotted path: ``recursive_getattr(model, "encoder.layer.weight")``.

    Raises:
        AttributeError: a part of the path does not exist.
    """
    return functools.reduce(getattr, attr.split("."), obj)


def merge_dicts(source: dict[Any, Any], destination: dict[Any, Any]) -> dict[Any, Any]:
    """Merge a dictionary into another in place, recursively; values of ``source`` take precedence.

    Returns:
        ``destination``.
    """
    for key, value in source.items():
        if isinstance(value, dict):
            inner = destination.get(key)
            value = merge_dicts(value, inner if isinstance(inner, dict) else {})
        destination[key] = value
    return destination

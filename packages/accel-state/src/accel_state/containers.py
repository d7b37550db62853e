"""Rebuilds containers (lists, tuples, mappings, data classes), and reaches into nested ones."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Iterable, Mapping
from typing import Any


def is_namedtuple(data: Any) -> bool:
    """Whether the object is a named tuple (from collections or typing)."""
    return isinstance(data, tuple) and hasattr(data, "_asdict") and hasattr(data, "_fields")


def is_dataclass_instance(data: Any) -> bool:
    """Whether the object is an instance of a data class (and not the class)."""
    return dataclasses.is_dataclass(data) and not isinstance(data, type)


def is_container(data: Any) -> bool:
    """Whether the object is nested data rather than a leaf."""
    return isinstance(data, (tuple, list, Mapping)) or is_dataclass_instance(data)


def honor_type(obj: Any, generator: Iterable[Any]) -> Any:
    """Build an object of the type of ``obj`` (a list, tuple or named tuple) from the values of ``generator``."""
    return type(obj)(*generator) if is_namedtuple(obj) else type(obj)(generator)


def rebuild_mapping(data: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """A mapping of the type of ``data`` with the same keys and new values."""
    if type(data) is dict:
        return items
    if not hasattr(data, "__setitem__"):
        return type(data)(items)  # type: ignore[call-arg]
    # A copy keeps the other attributes of a subclass (a default factory, a tokenizer's encodings, ...).
    new = copy.copy(data)
    for key, value in items.items():
        new[key] = value
    return new


def rebuild_dataclass(data: Any, values: dict[str, Any]) -> Any:
    """A data class instance of the type of ``data`` with new values, also of frozen and ``init=False`` fields."""
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

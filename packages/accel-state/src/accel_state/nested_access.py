"""Reaching into nested attributes and dictionaries."""

from __future__ import annotations

import functools
from typing import Any


def recursive_getattr(obj: Any, attr: str) -> Any:
    """The attribute at a dotted path: ``recursive_getattr(model, "encoder.layer.weight")``.

    Raises:
        AttributeError: a part of the path does not exist.
    """
    return functools.reduce(getattr, attr.split("."), obj)


def merge_dicts(source: dict[Any, Any], destination: dict[Any, Any]) -> dict[Any, Any]:
    """Merge a dictionary into another, in place; dictionaries inside merge likewise, other values of ``source`` win.

    Returns:
        ``destination``.
    """
    for key, value in source.items():
        inner = destination.get(key)
        destination[key] = (
            merge_dicts(value, inner if isinstance(inner, dict) else {}) if isinstance(value, dict) else value
        )
    return destination

"""Access to nested attributes and dictionaries."""

from __future__ import annotations

import functools
from typing import Any


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

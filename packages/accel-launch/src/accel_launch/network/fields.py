"""Reads JSON that another machine has sent."""

from __future__ import annotations

from typing import Any


def checked(data: Any, **types: type) -> dict[str, Any]:
    """The fields of a JSON object, each of the given type.

    Raises:
        ValueError: one is missing or has another type.
    """
    if not isinstance(data, dict):
        raise ValueError(f"{type(data).__name__} is not a JSON object")
    for name, kind in types.items():
        if not isinstance(data.get(name), kind):
            raise ValueError(f"{name}={data.get(name)!r} is not {kind.__name__}")
    return {name: data[name] for name in types}

"""Reads JSON that another machine has sent."""

from __future__ import annotations

import json
from typing import Any


def read_object(text: bytes) -> dict[str, Any]:
    """A JSON object.

    Raises:
        ValueError: it is something else.
    """
    try:
        data = json.loads(text)
    except RecursionError:
        raise ValueError("the JSON is nested too deeply") from None
    checked(data)
    return dict(data)


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

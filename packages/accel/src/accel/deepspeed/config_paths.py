"""Values in a DeepSpeed configuration, addressed by dotted path."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

AUTO = "auto"
MISSING: Any = object()


def get(config: Mapping[str, Any], path: str, default: Any = None) -> Any:
    """The value at a path; ``default`` where there is none."""
    node: Any = config
    for key in path.split("."):
        if not isinstance(node, Mapping) or key not in node:
            return default
        node = node[key]
    return node


def put(config: dict[str, Any], path: str, value: Any) -> None:
    """Set the value at a path, with the sections on the way to it."""
    *sections, key = path.split(".")
    node = config
    for section in sections:
        node = node.setdefault(section, {})
    node[key] = value


def drop(config: dict[str, Any], path: str) -> None:
    """Remove what is at a path, if anything is."""
    section, _, key = path.rpartition(".")
    node = get(config, section) if section else config
    if isinstance(node, dict):
        node.pop(key, None)


def copied(config: Any) -> Any:
    """A copy in which no two sections are the same object, as two may be in a script's dictionary."""
    if isinstance(config, Mapping):
        return {key: copied(value) for key, value in config.items()}
    return [copied(value) for value in config] if isinstance(config, list) else config


def autos(config: Any, prefix: str = "") -> Iterator[str]:
    """The paths of everything that is "auto"; elements of lists by their number."""
    items = config.items() if isinstance(config, Mapping) else enumerate(config) if isinstance(config, list) else ()
    for key, value in items:
        path = f"{prefix}.{key}" if prefix else str(key)
        if isinstance(value, str) and value == AUTO:
            yield path
        else:
            yield from autos(value, path)

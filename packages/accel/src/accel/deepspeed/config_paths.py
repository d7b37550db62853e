"""Access to the values of a DeepSpeed configuration by dotted path."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

AUTO = "auto"
MISSING: Any = object()


def get_value(config: Mapping[str, Any], path: str, default: Any = None) -> Any:
    """Return the value at a path, or ``default``."""
    node: Any = config
    for key in path.split("."):
        if not isinstance(node, Mapping) or key not in node:
            return default
        node = node[key]
    return node


def set_value(config: dict[str, Any], path: str, value: Any) -> None:
    """Set the value at a path, creating sections that are missing or null."""
    *sections, key = path.split(".")
    node = config
    for section in sections:
        if node.get(section) is None:
            node[section] = {}
        node = node[section]
    node[key] = value


def delete_value(config: dict[str, Any], path: str) -> None:
    """Remove the value at a path, if there is one."""
    section, _, key = path.rpartition(".")
    node = get_value(config, section) if section else config
    if isinstance(node, dict):
        node.pop(key, None)


def copy_config(config: Any) -> Any:
    """Return a deep copy in which no two sections are the same object (``copy.deepcopy`` keeps such aliases)."""
    if isinstance(config, Mapping):
        return {key: copy_config(value) for key, value in config.items()}
    return [copy_config(value) for value in config] if isinstance(config, list) else config


def auto_paths(config: Any, prefix: str = "") -> Iterator[str]:
    """Yield the paths of all values that are "auto"; list elements are addressed by index."""
    items: Any = enumerate(config) if isinstance(config, list) else ()
    if isinstance(config, Mapping):
        items = config.items()
    for key, value in items:
        path = f"{prefix}.{key}" if prefix else str(key)
        if isinstance(value, str) and value == AUTO:
            yield path
        else:
            yield from auto_paths(value, path)


def leaf_paths(config: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the paths of all values that are not sections."""
    for key, value in config.items():
        path = f"{prefix}.{key}" if prefix else str(key)
        if isinstance(value, Mapping) and value:
            yield from leaf_paths(value, path)
        else:
            yield path

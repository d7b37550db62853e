"""Which values of a configuration were filled in for "auto", so that the next model's can be."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from accel_state.errors import ConfigurationError

from .nested import AUTO, MISSING, copied, drop, get, put


class Filling:
    """Remembers what was asked for at the places that were filled in.

    Attributes:
        filled: by dotted path, what stood there before (missing or "auto"), and what was put there (or missing).
    """

    def __init__(self) -> None:
        self.filled: dict[str, tuple[Any, Any]] = {}
        self._asked: Mapping[str, Any] = {}

    def reopened(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """A copy in which whatever was filled in is open again, unless somebody has changed it since."""
        again = copied(config)
        for path, (before, after) in self.filled.items():
            if get(config, path, MISSING) != after:
                continue
            if before is MISSING:
                drop(again, path)
                self._drop_new_sections(again, path)
            else:
                put(again, path, copied(before))
        return again

    def _drop_new_sections(self, config: dict[str, Any], path: str) -> None:
        """Remove the sections around a path that are empty now and were not there."""
        section = path.rpartition(".")[0]
        while section and get(config, section) == {} and get(self._asked, section, MISSING) is MISSING:
            drop(config, section)
            section = section.rpartition(".")[0]

    def show(self, config: dict[str, Any], asked: Mapping[str, Any], complete: Mapping[str, Any]) -> None:
        """Enter the values of a complete configuration into the one that users look at, in place."""
        self._asked = asked
        paths = {path: None for path in (*_leaves(asked), *_leaves(complete))}
        changed = {path: (get(asked, path, MISSING), get(complete, path, MISSING)) for path in paths}
        # What was left out for this model alone (the optimizer, of one that is not trained) stays in sight.
        self.filled = {
            path: (before, after)
            for path, (before, after) in changed.items()
            if before != after and (after is not MISSING or (before == AUTO and path.split(".")[0] in complete))
        }
        for path, (_, after) in self.filled.items():
            if after is MISSING:
                drop(config, path)
            else:
                put(config, path, copied(after))


def _leaves(config: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in config.items():
        path = f"{prefix}.{key}" if prefix else str(key)
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, path)
        else:
            yield path


def fill_match(config: dict[str, Any], path: str, mismatches: list[str], must_match: bool, values: Mapping[str, Any]) -> None:
    """Replace one "auto", or compare; see DeepSpeedPlugin.fill_match."""
    now = get(config, path, MISSING)
    if now is MISSING:
        return
    if now == AUTO:
        if path not in values:
            raise ConfigurationError(
                f"`{path}` not found in kwargs. Please specify `{path}` without `auto` (set to correct value) in the DeepSpeed config file "
                "or pass it in kwargs."
            )
        put(config, path, values[path])
    elif must_match and now is not None and path in values and now != values[path]:
        mismatches.append(f"- ds {path}={now} vs arg {path}={values[path]}")


def process(
    whole: dict[str, Any], prefix: str, section: Mapping[str, Any], mismatches: list[str], must_match: bool, values: Mapping[str, Any]
) -> None:
    """Do so for every value of a section whose keys begin with ``prefix``."""
    for path in list(_leaves(section, prefix.rstrip("."))):
        fill_match(whole, path, mismatches, must_match, values)

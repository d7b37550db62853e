"""The configuration file of ``accel launch``: found, read, brought up to date and checked, and then merged with
everything else.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accel_state.errors import ConfigurationError
from accel_state.options import (
    ConfigFile,
    Entry,
    Option,
    Resolution,
    ScriptOptions,
    check,
    find_default,
    load_groups,
    migrate,
    resolve,
)

from ..suggestions import suggest

_SHOWN_CHARACTERS = 60


def load_settings(options: Mapping[str, Any] | None = None, environ: Mapping[str, str] | None = None) -> Resolution:
    """Every setting, from the command line, the environment, the configuration file that these two name, and the
    defaults.

    Args:
        options: what the command line gave, by the options' names.
        environ: environment variables; left out, those of this process.

    Raises:
        ConfigurationError: a value is not allowed, a key is not known, or settings contradict one another; the message
            names them.
    """
    groups, given = load_groups(), dict(options or {})
    named = {name: text for name, text in given.items() if name == "config_file"}
    path = resolve([ScriptOptions], named, environ)["config_file"]
    return check(resolve(groups, given, environ, read_config(path, environ)))


def read_config(path: str | Path | None, environ: Mapping[str, str] | None = None) -> ConfigFile | None:
    """Read a configuration file, bring it up to date, and check its keys and values.

    Args:
        path: the file; None means the default one, if it exists.
        environ: environment variables that say where the default one is.

    Raises:
        ConfigurationError: the file cannot be read, or holds a key that is not known or a value that is not allowed;
            the message names file, line and key.
    """
    found = path if path is not None else find_default(environ)
    if found is None:
        return None
    config = migrate(ConfigFile.read(found), load_groups())
    check_keys(config)
    return config


def check_keys(config: ConfigFile) -> None:
    """Refuse a key that would be ignored, and a value that its option does not take.

    Raises:
        ConfigurationError: see :func:`read_config`.
    """
    known = {key: opt for group in load_groups() for opt in group.options() for key in opt.keys}
    sections = {key.split(".")[0] for key in known if "." in key}
    for entry in config.entries.values():
        _check_entry(entry, known, sections)


def _check_entry(entry: Entry, known: Mapping[str, Option], sections: set[str]) -> None:
    top = entry.key.split(".")[0]
    if entry.key in known:
        if entry.value not in (None, ""):
            known[entry.key].parse(entry.value, f"{entry.key} in {entry.location}")
    elif entry.key in sections:
        if entry.value is not None and not isinstance(entry.value, dict):
            raise ConfigurationError(
                f"{entry.location}: {entry.key} must be a mapping of keys to values, not {entry.value!r}."
            )
    elif not (top in known and known[top].kind is dict):
        _refuse(entry, known, sections)


def _refuse(entry: Entry, known: Mapping[str, Option], sections: set[str]) -> None:
    top, _, inner = entry.key.partition(".")
    if inner and top in sections:
        candidates = sorted(key for key in known if key.startswith(f"{top}."))
    else:
        candidates = sorted({*sections, *(key for key in known if "." not in key)})
    value = repr(entry.value)
    raise ConfigurationError(
        f"{entry.location}: {entry.key} is not a known key.{_suggest_key(entry.key, candidates, known)} "
        f"Its value is {value if len(value) < _SHOWN_CHARACTERS else value[:_SHOWN_CHARACTERS] + '...'}. Known: "
        f"{', '.join(candidates)}."
    )


def _suggest_key(key: str, candidates: list[str], known: Mapping[str, Option]) -> str:
    """The key of this section that ends so, or of the same name in another one, or else one that is spelt nearly so."""
    last = key.split(".")[-1]
    here = [candidate for candidate in candidates if "." in key and candidate.endswith(f"_{last}")]
    if here:
        return f" Did you mean {here[0]}?"
    elsewhere = [opt.key for opt in known.values() if opt.key and (opt.name == last or opt.key.split(".")[-1] == last)]
    return f" Did you mean {elsewhere[0]}?" if elsewhere else suggest(key, [*candidates, *sorted(known)])

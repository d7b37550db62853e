"""Finds, reads and checks the configuration file of ``accel launch``, and merges it with all other settings."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from accel_state.env import all_variables
from accel_state.errors import ConfigurationError
from accel_state.options.config_file import ConfigFile, Entry, expand, find_default, migrate
from accel_state.options.conflicts import check
from accel_state.options.declaration import Option
from accel_state.options.launch import ScriptOptions
from accel_state.options.registry import all_options, load_groups
from accel_state.options.resolution import Resolution, resolve
from accel_state.secrets import hide

from ..errors import suggest

_SHOWN_CHARACTERS = 60

# How names of variables of options begin, and what users write instead of the first.
_PREFIXES = ("ACCELERATE_", "ACCEL_", "FSDP_", "MEGATRON_LM_", "PARALLELISM_CONFIG_")
# Variables that are spelt like one of an option: a launcher with --ft sets them for its ranks.
_NOT_MISSPELT = ("ACCELERATE_FT_REPLICA", "ACCELERATE_FT_RESTARTS")


def load_settings(options: Mapping[str, Any] | None = None, environ: Mapping[str, str] | None = None) -> Resolution:
    """Return every setting, from the command line, the environment, the configuration file and the defaults."""
    given = dict(options or {})
    settings = check(resolve(load_groups(), given, environ, read_config(given_path(given, environ), environ)))
    return replace(settings, file_notes=(*settings.file_notes, *_misspelt_variables(environ)))


def _misspelt_variables(environ: Mapping[str, str] | None) -> list[str]:
    """Return notes on variables that belong to no option and are spelt almost like one that does."""
    known = set(_NOT_MISSPELT)
    for opt in all_options().values():
        known.update((opt.env or "", *opt.other_envs))
    notes = []
    for name in sorted((all_variables() if environ is None else environ).keys() - known):
        # The cutoff leaves out the variables of Accelerate and accel that are not options.
        close = difflib.get_close_matches(name, known, n=1, cutoff=0.86) if name.startswith(_PREFIXES) else ()
        if close:
            notes.append(f"environment variable {name} has no effect. Did you mean {close[0]}?")
    return notes


def given_path(options: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> Path | None:
    """Return the configuration file that the command line or the environment names."""
    given = {"config_file": options["config_file"]} if "config_file" in options else {}
    path = resolve([ScriptOptions], given, environ)["config_file"]
    return None if path is None else expand(path)


def read_config(
    path: str | Path | None, environ: Mapping[str, str] | None = None, keep_unknown: bool = False
) -> ConfigFile | None:
    """Read a file (None: the default one, if it exists), translate keys of other versions, and check it.

    With ``keep_unknown``, unknown keys get a note instead of an error.
    """
    file = path if path is not None else find_default(environ)
    if file is None:
        return None
    config = migrate(ConfigFile.read(file), load_groups())
    unknown = check_keys(config, keep_unknown)
    return replace(config, notes=(*config.notes, *unknown))


def check_keys(config: ConfigFile, keep_unknown: bool = False) -> list[str]:
    """Refuse values that are not allowed, and unknown keys; return notes on the latter instead if they are kept."""
    unknown = []
    known = {key: opt for opt in all_options().values() for key in opt.keys}
    sections = {key.split(".")[0] for key in known if "." in key}
    for entry in config.entries.values():
        top = entry.key.split(".")[0]
        if entry.key in known:
            if entry.value not in (None, ""):
                known[entry.key].parse(entry.value, f"{entry.key} in {entry.location}")
        elif entry.key in sections:
            if entry.value is not None and not isinstance(entry.value, dict):
                shown = hide(entry.key, entry.value)
                raise ConfigurationError(
                    f"{entry.location}: {entry.key} must be a mapping of keys to values, not {shown!r}."
                )
        elif not (top in known and known[top].kind is dict):
            if not keep_unknown:
                raise _unknown_key(entry, known, sections)
            hint = _suggest_key(entry.key, _candidates(entry, known, sections), known)
            unknown.append(f"{entry.location}: {entry.key} is not a known key and is kept.{hint}")
    return unknown


def _candidates(entry: Entry, known: Mapping[str, Option], sections: set[str]) -> list[str]:
    """Return the keys of the entry's section, or those outside sections."""
    top, _, inner = entry.key.partition(".")
    if inner and top in sections:
        return sorted(key for key in known if key.startswith(f"{top}."))
    return sorted({*sections, *(key for key in known if "." not in key)})


def _unknown_key(entry: Entry, known: Mapping[str, Option], sections: set[str]) -> ConfigurationError:
    candidates = _candidates(entry, known, sections)
    value = repr(hide(entry.key.split(".")[-1], entry.value))
    shown = value if len(value) < _SHOWN_CHARACTERS else f"{value[:_SHOWN_CHARACTERS]}..."
    return ConfigurationError(
        f"{entry.location}: {entry.key} is not a known key.{_suggest_key(entry.key, candidates, known)} "
        f"Its value is {shown}. Known: {', '.join(candidates)}."
    )


def _suggest_key(key: str, candidates: list[str], known: Mapping[str, Option]) -> str:
    """Return a key of this section with the same ending, the same name in another section, or a similar spelling."""
    last = key.split(".")[-1]
    similar = [candidate for candidate in candidates if "." in key and candidate.endswith(f"_{last}")]
    similar += [opt.key for opt in known.values() if opt.key and last in (opt.name, opt.key.split(".")[-1])]
    return f" Did you mean {similar[0]}?" if similar else suggest(key, [*candidates, *sorted(known)])

"""Reads configuration files of other versions of this format: translates their keys, with a note for each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ..errors import ConfigurationError
from .config_file import ConfigFile, Entry
from .declaration import Option, OptionGroup

# Current files use either key, so this one is not legacy.
_CURRENT = frozenset({"deepspeed_config.gradient_accumulation_steps"})


def migrate(config: ConfigFile, groups: Iterable[type[OptionGroup]]) -> ConfigFile:
    """Translate keys and values of other versions to those of this one.

    Args:
        config: a file as it was read.
        groups: every option group; their ``other_keys`` are the legacy names.

    Returns:
        The file under its current keys, with a note for each translated key.

    Raises:
        ConfigurationError: a legacy key and the current one contradict each other.
    """
    options = [opt for group in groups for opt in group.options()]
    renamed = {other: opt for opt in options for other in opt.other_keys if other not in _CURRENT}
    entries = dict(config.entries)
    notes = [*_half_precision(entries), *_unknown_count(entries), *_tensor_parallel(entries)]
    for old in [key for key in entries if key in renamed]:
        notes += _rename(entries, old, renamed[old])
    return replace(config, entries=entries, notes=(*config.notes, *notes))


def _rename(entries: dict[str, Entry], old: str, opt: Option) -> list[str]:
    legacy, key = entries.pop(old), str(opt.key)
    if legacy.value in (None, ""):
        return []
    current = entries.get(key)
    if current is None or current.value is None:
        entries[key] = Entry(key, legacy.value, legacy.location)
    elif opt.parse(current.value, f"{key} in {current.location}") != opt.parse(
        legacy.value, f"{old} in {legacy.location}"
    ):
        raise ConfigurationError(
            f"{legacy.location}: {old}={legacy.value!r} contradicts {key}={current.value!r} in {current.location}: "
            f"both are {opt.flags[0]}. Remove one."
        )
    section, _, inner = key.rpartition(".")
    if section and not isinstance(getattr(entries.get(section), "value", None), dict):
        entries[section] = Entry(section, {inner: legacy.value}, legacy.location)
    return [f"{legacy.location}: {old} is read as {key}; `accel config update` rewrites the file"]


def _half_precision(entries: dict[str, Entry]) -> list[str]:
    """Translate ``fp16: true`` to ``mixed_precision: fp16``, and likewise ``bf16``."""
    removed = [entries.pop(name) for name in ("fp16", "bf16") if name in entries]
    legacy = [entry for entry in removed if entry.value is not None]
    for entry in legacy:
        if not isinstance(entry.value, bool):
            raise ConfigurationError(
                f"{entry.location}: {entry.key}={entry.value!r} is not true or false. "
                f"Write mixed_precision: {entry.key} instead."
            )
    # True first: `fp16: false` next to `bf16: true` adds nothing.
    for entry in sorted(legacy, key=lambda entry: not entry.value):
        current = entries.get("mixed_precision")
        if current is None or current.value is None:
            entries["mixed_precision"] = Entry("mixed_precision", entry.key if entry.value else "no", entry.location)
        elif entry.value and str(current.value).lower() != entry.key:
            raise ConfigurationError(
                f"{entry.location}: {entry.key}={entry.value!r} contradicts mixed_precision={current.value!r} in "
                f"{current.location}. Remove one of them."
            )
    note = "is now a value of mixed_precision; `accel config update` rewrites the file"
    return [f"{entry.location}: {entry.key} {note}" for entry in legacy]


def _tensor_parallel(entries: dict[str, Entry]) -> list[str]:
    """Translate ``distributed_type: TP`` with its ``tp_config`` to a mesh."""
    run_type, section = entries.get("distributed_type"), entries.pop("tp_config", None)
    if section is not None and section.value is not None and not isinstance(section.value, dict):
        raise ConfigurationError(
            f"{section.location}: tp_config must be a mapping of keys to values, not {section.value!r}."
        )
    if run_type is None or str(run_type.value).upper() != "TP":
        return []
    entries["distributed_type"] = replace(run_type, value="MULTI_GPU")
    return [
        f"{run_type.location}: distributed_type TP is read as MULTI_GPU with a parallelism_config; `accel config "
        "update` rewrites the file"
    ]


def _unknown_count(entries: dict[str, Entry]) -> list[str]:
    """Translate ``num_processes: -1``, which meant "not set"."""
    entry = entries.get("num_processes")
    if entry is None or str(entry.value).strip() != "-1":
        return []
    entries["num_processes"] = replace(entry, value=None)
    return [f"{entry.location}: num_processes -1 is read as not set; `accel config update` removes it"]

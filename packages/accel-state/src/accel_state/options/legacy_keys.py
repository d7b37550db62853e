"""Configuration files that other versions of this format wrote: their keys are understood, with a note for each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ..errors import ConfigurationError
from .config_file import ConfigFile, Entry
from .option import Option, OptionGroup

# Nothing to mend: files of today have it in either place.
_CURRENT = frozenset({"deepspeed_config.gradient_accumulation_steps"})


def migrate(config: ConfigFile, groups: Iterable[type[OptionGroup]]) -> ConfigFile:
    """Read keys and values of other versions as those of this one.

    Args:
        config: a file as it was read.
        groups: every group of options, whose ``other_keys`` are the former names.

    Returns:
        The file under today's keys, with a note for each key that was another.

    Raises:
        ConfigurationError: a former key and today's contradict each other.
    """
    options = [opt for group in groups for opt in group.options()]
    renamed = {other: opt for opt in options for other in opt.other_keys if other not in _CURRENT}
    entries = dict(config.entries)
    notes = [*_half_precision(entries), *_unknown_count(entries), *_tensor_parallel(entries)]
    for old in [key for key in entries if key in renamed]:
        notes += _rename(entries, old, renamed[old])
    return replace(config, entries=entries, notes=(*config.notes, *notes))


def _rename(entries: dict[str, Entry], old: str, opt: Option) -> list[str]:
    entry, key = entries.pop(old), str(opt.key)
    if entry.value in (None, ""):
        return []
    today = entries.get(key)
    if today is not None and today.value is not None:
        _must_agree(opt, today, entry)
    entries[key] = today if today is not None and today.value is not None else Entry(key, entry.value, entry.place)
    section, _, inner = key.rpartition(".")
    if section and not isinstance(getattr(entries.get(section), "value", None), dict):
        entries[section] = Entry(section, {inner: entry.value}, entry.place)
    return [f"{entry.place}: {old} is read as {key}; `accel config update` writes it so"]


def _must_agree(opt: Option, one: Entry, other: Entry) -> None:
    if opt.parse(one.value, f"{one.key} in {one.place}") != opt.parse(other.value, f"{other.key} in {other.place}"):
        raise ConfigurationError(
            f"{other.place}: {other.key}={other.value!r} contradicts {one.key}={one.value!r} in {one.place}: both are "
            f"{opt.flags[0]}. Remove one."
        )


def _half_precision(entries: dict[str, Entry]) -> list[str]:
    """``fp16: true`` stood for ``mixed_precision: fp16``; ``bf16: true``, which many write, is read likewise."""
    old = [
        entry for name in ("fp16", "bf16") if (entry := entries.pop(name, None)) is not None and entry.value is not None
    ]
    for entry in old:
        if not isinstance(entry.value, bool):
            raise ConfigurationError(
                f"{entry.place}: {entry.key}={entry.value!r} is not true or false. Write mixed_precision: {entry.key} "
                "instead."
            )
    # Those that are switched on come first: `fp16: false` beside `bf16: true` says no more than that.
    for entry in sorted(old, key=lambda entry: not entry.value):
        _set_precision(entries, entry)
    return [
        f"{entry.place}: {entry.key} is now a value of mixed_precision; `accel config update` writes it so"
        for entry in old
    ]


def _set_precision(entries: dict[str, Entry], entry: Entry) -> None:
    today = entries.get("mixed_precision")
    if today is None or today.value is None:
        entries["mixed_precision"] = Entry("mixed_precision", entry.key if entry.value else "no", entry.place)
    elif entry.value and str(today.value).lower() != entry.key:
        raise ConfigurationError(
            f"{entry.place}: {entry.key}={entry.value!r} contradicts mixed_precision={today.value!r} in "
            f"{today.place}. Remove one of them."
        )


def _tensor_parallel(entries: dict[str, Entry]) -> list[str]:
    """``distributed_type: TP`` was a kind of its own, with its size in ``tp_config``; both are part of a mesh now."""
    kind, section = entries.get("distributed_type"), entries.pop("tp_config", None)
    if section is not None and section.value is not None and not isinstance(section.value, dict):
        raise ConfigurationError(
            f"{section.place}: tp_config must be a mapping of keys to values, not {section.value!r}."
        )
    if kind is None or str(kind.value).upper() != "TP":
        return []
    entries["distributed_type"] = replace(kind, value="MULTI_GPU")
    return [
        f"{kind.place}: distributed_type TP is read as MULTI_GPU with a parallelism_config; `accel config update` "
        "writes it so"
    ]


def _unknown_count(entries: dict[str, Entry]) -> list[str]:
    """``num_processes: -1`` stood for a number that nobody gave."""
    entry = entries.get("num_processes")
    if entry is None or str(entry.value).strip() != "-1":
        return []
    entries["num_processes"] = replace(entry, value=None)
    return [f"{entry.place}: num_processes -1 is read as not given; `accel config update` removes it"]

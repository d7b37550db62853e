"""Bringing a configuration file up to date without changing what it says."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path
from typing import Any

from accel_state.errors import ConfigurationError
from accel_state.options import ConfigFile, load_groups, resolve

from .comments import read_comments, write_comments
from .read import check_keys, read_config
from .write import BASE, declared, nest, to_text, write_text

# Left to the machine or to the script where a file does not say: to write them down would change what it says.
_LEFT_OUT = frozenset({"mixed_precision", "num_processes", "distributed_type", "cpu"})


def update_file(source: Path, target: Path) -> tuple[str, ...]:
    """Write a file's settings under today's keys, with the keys that every file holds.

    Args:
        source: a file of this or of an older version.
        target: where to write; may be the same.

    Returns:
        What was changed, and what to know.

    Raises:
        ConfigurationError: the file is not a valid one, or it cannot be written; nothing has been changed then.
    """
    config = read_config(source)
    if config is None:
        raise ConfigurationError(f"{source} does not exist.")
    content = updated(config)
    check_keys(config)
    notes = [
        note.removesuffix("; `accel config update` writes it so").removesuffix("; `accel config update` removes it")
        for note in config.notes
    ]
    notes += _left_out(config)
    text = to_text(target, content)
    commented = _with_comments(source, target, text)
    if commented is None:
        copy = _free_name(source)
        shutil.copy2(source, copy)
        notes.append(f"comments are not kept; the file with its comments is in {copy}")
    write_text(target, commented or text)
    return tuple(notes)


def _with_comments(source: Path, target: Path, text: str) -> str | None:
    """The new text with the comments of the file; None where they have no place in it."""
    if source.suffix == ".json" or not _has_comments(source):
        return text
    if target.suffix == ".json":
        return None
    import yaml  # `accel --help` loads this module

    comments = read_comments(source.read_text(encoding="utf-8-sig"))
    commented = write_comments(
        text, comments, {key: opt.key for opt in declared().values() if opt.key for key in opt.keys}
    )
    # Whatever a comment looks like, it must not change what the file says.
    return commented if yaml.safe_load(commented) == yaml.safe_load(text) else None


def _free_name(path: Path) -> Path:
    """A name for a copy that is not taken: what an earlier update kept stays."""
    names = (path.with_name(f"{path.name}.bak{number or ''}") for number in itertools.count())
    return next(name for name in names if not name.exists())


def _left_out(config: ConfigFile) -> list[str]:
    """Notes on the keys that have no effect any more."""
    retired = [(key, opt.retired) for opt in declared().values() if opt.retired for key in opt.keys]
    return [
        f"{entry.location}: {key} is left out: {reason}"
        for key, reason in retired
        if (entry := config.entry(key)) is not None
    ]


def updated(config: ConfigFile) -> dict[str, Any]:
    """The content of the file as this version writes it."""
    settings = resolve(load_groups(), {}, environ={}, config=config)
    options = declared()
    present = {opt.name for opt in options.values() if any(_has(config, key) for key in opt.keys)}
    values = {name: settings[name] for name in options if name in present and options[name].retired is None}
    if settings["compute_environment"] == "LOCAL_MACHINE":
        values = {**{name: options[name].default for name in BASE if name not in _LEFT_OUT}, **values}
    return nest({**values, "compute_environment": settings["compute_environment"]})


def _has(config: ConfigFile, key: str) -> bool:
    entry = config.entry(key)
    return entry is not None and entry.value not in (None, "")


def _has_comments(path: Path) -> bool:
    return any(
        line.lstrip().startswith("#") or " #" in line for line in path.read_text(encoding="utf-8-sig").splitlines()
    )

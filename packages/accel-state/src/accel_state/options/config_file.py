"""Reads configuration files (YAML or JSON) with the line of every key, so that messages can point at it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..env import read_str
from ..errors import ConfigurationError, MissingFileError, require
from ..secrets import hide_in_text
from .declaration import Option, OptionGroup
from .fsdp import SHARDING_STRATEGIES

DIRECTORY = "accel"
REFERENCE_DIRECTORY = "accelerate"
# Far more than any configuration has; a few lines of nested aliases can stand for billions of values.
_MAX_BYTES = 1 << 20
_MAX_VALUES = 20_000
FILE_NAMES = ("default_config.yaml", "default_config.yml", "default_config.json")


@dataclass(frozen=True)
class Entry:
    """One value of a file."""

    key: str  # ``section.key`` if nested
    value: Any
    location: str  # "FILE, line N", for messages


@dataclass(frozen=True)
class ConfigFile:
    """The entries of a configuration file by key, those of sections included."""

    path: Path
    entries: Mapping[str, Entry]
    notes: tuple[str, ...] = ()  # messages to the user about keys of other versions of this format

    def entry(self, key: str) -> Entry | None:
        """Return the entry of a key, or None."""
        return self.entries.get(key)

    @classmethod
    def read(cls, path: str | Path) -> ConfigFile:
        """Read a file. JSON is read as YAML, of which it is a subset.

        Raises:
            ConfigurationError: the file is missing, unreadable, not YAML or JSON, not a mapping, or has a duplicate
                key; the message names the file and the line.
            MissingDependencyError: pyyaml is not installed.
        """
        path = expand(path)
        text = _read_text(path)
        yaml = require("yaml", purpose=f"reading the configuration file {path}", install="pyyaml")
        try:
            # JSON allows tabs between tokens, YAML does not; within a JSON string a tab is written \t.
            root = yaml.compose(text.replace("\t", " ") if path.suffix == ".json" else text, Loader=yaml.SafeLoader)
            if root is not None and _count_values(yaml, root, {}) > _MAX_VALUES:
                raise ConfigurationError(
                    f"configuration file {path}: it has more than {_MAX_VALUES} values, aliases (`*name`) counted "
                    "wherever they are used. Write out the settings that the run needs."
                )
            return cls(path, _collect(yaml, root, path))
        except yaml.YAMLError as error:
            raise ConfigurationError(
                f"configuration file {path}: not valid YAML or JSON: {hide_in_text(_one_line(error))}"
            ) from None
        except RecursionError:
            raise ConfigurationError(
                f"configuration file {path}: sections are nested too deeply, or contain themselves."
            ) from None


def _read_text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
        if len(content) > _MAX_BYTES:
            raise ConfigurationError(
                f"configuration file {path}: it has more than {_MAX_BYTES} bytes. Give a configuration file with "
                "--config_file."
            )
        return content.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except ConfigurationError:
        raise
    except OSError as error:
        kind = MissingFileError if isinstance(error, FileNotFoundError) else ConfigurationError
        raise kind(f"configuration file {path}: {error.strerror}. Give an existing file with --config_file.") from None
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"configuration file {path}: not UTF-8 text (byte {error.start}).") from None
    except ValueError as error:
        raise ConfigurationError(f"configuration file {str(path)!r}: {error}.") from None


def default_folder(environ: Mapping[str, str] | None = None) -> Path:
    """Return the default file's directory: accel in HF_HOME, XDG_CACHE_HOME/huggingface or ~/.cache/huggingface."""
    return _home(environ) / DIRECTORY


def default_path(environ: Mapping[str, str] | None = None) -> Path:
    """Return the path that a default file is written to."""
    return default_folder(environ) / FILE_NAMES[0]


def find_default(environ: Mapping[str, str] | None = None) -> Path | None:
    """Return the existing default file, else the one of Hugging Face Accelerate, else None."""
    home = _home(environ)
    for parent in (home / DIRECTORY, home / REFERENCE_DIRECTORY):
        for name in FILE_NAMES:
            if os.path.isfile(parent / name):
                return parent / name
    return None


def _home(environ: Mapping[str, str] | None) -> Path:
    home = read_str("HF_HOME", environ=environ)
    if home is None:
        home = str(Path(read_str("XDG_CACHE_HOME", "~/.cache", environ) or "~/.cache") / "huggingface")
    return expand(home)


def expand(path: str | os.PathLike[str]) -> Path:
    """Replace ``~`` by the home directory; ``~name`` of an unknown user is left unchanged."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def _collect(yaml: Any, root: Any, path: Path) -> dict[str, Entry]:
    if root is None or (isinstance(root, yaml.ScalarNode) and root.tag == "tag:yaml.org,2002:null"):
        return {}
    if not isinstance(root, yaml.MappingNode):
        raise ConfigurationError(
            f"configuration file {path}: must be a mapping of keys to values, such as `num_processes: 2`."
        )
    entries: dict[str, Entry] = {}
    for entry in _walk(yaml, root, path, ""):
        if entry.key in entries:
            raise ConfigurationError(
                f"{entry.location}: {entry.key} is given twice; first in {entries[entry.key].location}. Remove one."
            )
        entries[entry.key] = entry
    return entries


def _count_values(yaml: Any, node: Any, counted: dict[int, int]) -> int:
    """Return how many values a node stands for, with every alias replaced by what it refers to."""
    if id(node) not in counted:
        counted[id(node)] = _MAX_VALUES + 1  # for a node that contains itself
        parts: list[Any] = []
        if isinstance(node, yaml.MappingNode):
            parts = [part for pair in node.value for part in pair]
        elif isinstance(node, yaml.SequenceNode):
            parts = node.value
        counted[id(node)] = 1 + sum(_count_values(yaml, part, counted) for part in parts)
    return counted[id(node)]


def _walk(yaml: Any, node: Any, path: Path, prefix: str) -> Iterator[Entry]:
    for key_node, value_node in node.value:
        location = f"{path}, line {key_node.start_mark.line + 1}"
        if not isinstance(key_node, yaml.ScalarNode):
            raise ConfigurationError(f"{location}: a key must be a name.")
        key = prefix + str(key_node.value)
        yield Entry(key, _construct(yaml, value_node, location), location)
        if isinstance(value_node, yaml.MappingNode):
            yield from _walk(yaml, value_node, path, f"{key}.")


def _construct(yaml: Any, node: Any, location: str) -> Any:
    if isinstance(node, yaml.ScalarNode) and node.tag == "tag:yaml.org,2002:int" and ":" in node.value:
        return str(node.value)  # YAML 1.1 reads the range 1:4 as a number to the base of 60
    try:
        value = yaml.SafeLoader("").construct_object(node, deep=True)
        repr(value)  # raises on an integer with more digits than Python converts to text
    except (yaml.YAMLError, ValueError, TypeError, AttributeError, LookupError, OverflowError) as error:
        # A tag that does not fit its value (`!!int x`) makes the loader raise many kinds of errors.
        raise ConfigurationError(f"{location}: the value cannot be read: {_one_line(error)}") from None
    return value


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


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
    notes = [*_half_precision(entries), *_unknown_count(entries), *_tensor_parallel(entries), *_reshard(entries)]
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
            f"{section.location}: tp_config must be a mapping of keys to values, not "
            f"{hide_in_text(repr(section.value))}."
        )
    if run_type is None or str(run_type.value).upper() != "TP":
        return []
    cpu = entries.get("use_cpu")
    new = "MULTI_CPU" if cpu is not None and str(cpu.value).lower() in ("true", "yes", "1") else "MULTI_GPU"
    entries["distributed_type"] = replace(run_type, value=new)
    return [
        f"{run_type.location}: distributed_type TP is read as {new} with a parallelism_config; `accel config "
        "update` rewrites the file"
    ]


def _reshard(entries: dict[str, Entry]) -> list[str]:
    """Translate a sharding strategy that is given as ``fsdp_reshard_after_forward``."""
    old, key = "fsdp_config.fsdp_reshard_after_forward", "fsdp_config.fsdp_sharding_strategy"
    entry = entries.get(old)
    if entry is None or str(entry.value).upper() not in SHARDING_STRATEGIES:
        return []
    del entries[old]
    if key in entries:
        return [f"{entry.location}: {old}={entry.value!r} has no effect next to {key}"]
    entries[key] = Entry(key, entry.value, entry.location)
    return [f"{entry.location}: {old}={entry.value!r} is read as {key}; `accel config update` rewrites the file"]


def _unknown_count(entries: dict[str, Entry]) -> list[str]:
    """Translate ``num_processes: -1``, which meant "not set"."""
    entry = entries.get("num_processes")
    if entry is None or str(entry.value).strip() != "-1":
        return []
    entries["num_processes"] = replace(entry, value=None)
    return [f"{entry.location}: num_processes -1 is read as not set; `accel config update` removes it"]

"""Reads configuration files (YAML or JSON) with the line of every key, so that messages can point at it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..env import read_str
from ..errors import ConfigurationError, require

DIRECTORY = "accel"
REFERENCE_DIRECTORY = "accelerate"
FILE_NAMES = ("default_config.yaml", "default_config.yml", "default_config.json")


@dataclass(frozen=True)
class Entry:
    """One value of a file.

    Attributes:
        key: ``section.key`` if nested.
        location: "FILE, line N", for messages.
    """

    key: str
    value: Any
    location: str


@dataclass(frozen=True)
class ConfigFile:
    """The entries of a configuration file by key, those of sections included.

    Attributes:
        notes: messages to the user about keys of other versions of this format.
    """

    path: Path
    entries: Mapping[str, Entry]
    notes: tuple[str, ...] = ()

    def entry(self, key: str) -> Entry | None:
        """The entry of a key, or None."""
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
            return cls(path, _collect(yaml, root, path))
        except yaml.YAMLError as error:
            raise ConfigurationError(f"configuration file {path}: not valid YAML or JSON: {_one_line(error)}") from None
        except RecursionError:
            raise ConfigurationError(
                f"configuration file {path}: sections are nested too deeply, or contain themselves."
            ) from None


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigurationError(
            f"configuration file {path}: {error.strerror}. Give an existing file with --config_file."
        ) from None
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"configuration file {path}: not UTF-8 text (byte {error.start}).") from None
    except ValueError as error:
        raise ConfigurationError(f"configuration file {str(path)!r}: {error}.") from None


def default_folder(environ: Mapping[str, str] | None = None) -> Path:
    """The directory of the default file: accel in HF_HOME, XDG_CACHE_HOME/huggingface or ~/.cache/huggingface."""
    return _home(environ) / DIRECTORY


def default_path(environ: Mapping[str, str] | None = None) -> Path:
    """The path that a default file is written to."""
    return default_folder(environ) / FILE_NAMES[0]


def find_default(environ: Mapping[str, str] | None = None) -> Path | None:
    """The existing default file, else the one of Hugging Face Accelerate, else None."""
    directories = (_home(environ) / DIRECTORY, _home(environ) / REFERENCE_DIRECTORY)
    return next((path for parent in directories for name in FILE_NAMES if os.path.isfile(path := parent / name)), None)


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
    try:
        value = yaml.SafeLoader("").construct_object(node, deep=True)
        repr(value)  # raises on an integer with more digits than Python converts to text
    except (yaml.YAMLError, ValueError, TypeError, AttributeError, LookupError, OverflowError) as error:
        # A tag that does not fit its value (`!!int x`) makes the loader raise many kinds of errors.
        raise ConfigurationError(f"{location}: the value cannot be read: {_one_line(error)}") from None
    return value


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())

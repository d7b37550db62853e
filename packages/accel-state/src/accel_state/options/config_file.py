"""Configuration files: YAML or JSON, with the line of every key, so that a message can point at it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..env import read_str
from ..errors import ConfigurationError, require

FOLDER = "accel"
OTHER_FOLDER = "accelerate"
FILE_NAMES = ("default_config.yaml", "default_config.yml", "default_config.json")


@dataclass(frozen=True)
class Entry:
    """One value of a file.

    Attributes:
        key: ``section.key`` where it is nested.
        place: "FILE, line N", for messages.
    """

    key: str
    value: Any
    place: str


@dataclass(frozen=True)
class ConfigFile:
    """The entries of a configuration file, by key; a section that is itself a mapping is an entry too.

    Attributes:
        notes: what was understood although another version of this format wrote it, for the user to know.
    """

    path: Path
    entries: Mapping[str, Entry]
    notes: tuple[str, ...] = ()

    def entry(self, key: str) -> Entry | None:
        """What the file has under a key; None where it has nothing."""
        return self.entries.get(key)

    @classmethod
    def read(cls, path: str | Path) -> ConfigFile:
        """Read a file. JSON is read as the YAML that it is.

        Raises:
            ConfigurationError: there is no such file, it cannot be read, it is not YAML or JSON, it is not a mapping,
                or a key comes twice; the message names the file and, where there is one, the line.
            MissingDependencyError: pyyaml is not installed.
        """
        path = expand(path)
        text = _read_text(path)
        yaml = require("yaml", purpose=f"reading the configuration file {path}", install="pyyaml")
        try:
            # JSON allows tabs between tokens, which YAML refuses; within a JSON string a tab is written \t.
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
    """The folder of the default file: accel in HF_HOME, else in XDG_CACHE_HOME/huggingface, else in
    ~/.cache/huggingface.
    """
    return _home(environ) / FOLDER


def default_path(environ: Mapping[str, str] | None = None) -> Path:
    """Where a default file is written."""
    return default_folder(environ) / FILE_NAMES[0]


def find_default(environ: Mapping[str, str] | None = None) -> Path | None:
    """The default file; where there is none, that of Hugging Face Accelerate; None where there is neither."""
    folders = (_home(environ) / FOLDER, _home(environ) / OTHER_FOLDER)
    return next((path for folder in folders for name in FILE_NAMES if os.path.isfile(path := folder / name)), None)


def _home(environ: Mapping[str, str] | None) -> Path:
    home = read_str("HF_HOME", environ=environ)
    if home is None:
        home = str(Path(read_str("XDG_CACHE_HOME", "~/.cache", environ) or "~/.cache") / "huggingface")
    return expand(home)


def expand(path: str | os.PathLike[str]) -> Path:
    """``~`` as the home folder; a ``~name`` of nobody is left as it is, and not found."""
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
                f"{entry.place}: {entry.key} is given twice; first in {entries[entry.key].place}. Remove one."
            )
        entries[entry.key] = entry
    return entries


def _walk(yaml: Any, node: Any, path: Path, prefix: str) -> Iterator[Entry]:
    for key_node, value_node in node.value:
        place = f"{path}, line {key_node.start_mark.line + 1}"
        if not isinstance(key_node, yaml.ScalarNode):
            raise ConfigurationError(f"{place}: a key must be a name.")
        key = prefix + str(key_node.value)
        yield Entry(key, _construct(yaml, value_node, place), place)
        if isinstance(value_node, yaml.MappingNode):
            yield from _walk(yaml, value_node, path, f"{key}.")


def _construct(yaml: Any, node: Any, place: str) -> Any:
    loader = yaml.SafeLoader("")
    try:
        value = loader.construct_object(node, deep=True)
        repr(value)  # a number of more digits than Python writes could not be put into any message
    except (yaml.YAMLError, ValueError, TypeError, AttributeError, LookupError, OverflowError) as error:
        # A tag on a value that it does not fit (`!!int x`) makes the reader stumble in many ways.
        raise ConfigurationError(f"{place}: the value cannot be read: {_one_line(error)}") from None
    return value


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())

"""``accel config update``: renames old keys of a configuration file and adds missing ones."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from accel_state.errors import ConfigurationError
from accel_state.options.config_file import ConfigFile, default_path
from accel_state.options.registry import all_options, load_groups
from accel_state.options.resolution import resolve

from .read import read_config
from .write import BASE, keep_comments, nest, to_text, write_text

# Where a file does not set these, the machine or the script decides; writing a default would change the meaning.
_LEFT_OUT = frozenset({"mixed_precision", "num_processes", "distributed_type", "cpu"})


def update_file(source: Path, target: Path) -> tuple[str, ...]:
    """Write the settings of a file under their current keys, with the keys that every file holds."""
    config = read_config(source)
    if config is None:
        raise ConfigurationError(f"{source} does not exist.")
    content = updated(config)
    notes = [note.partition("; `accel config update`")[0] for note in config.notes]
    for opt in all_options().values():
        entries = [entry for key in opt.keys if opt.retired and (entry := config.entry(key)) is not None]
        notes += [f"{entry.location}: {entry.key} is left out: {opt.retired}" for entry in entries]
    text = to_text(target, content)
    notes += keep_comments(source, target)
    write_text(target, text)
    return tuple(notes)


def updated(config: ConfigFile) -> dict[str, Any]:
    """Return the content of the file as this version writes it."""
    settings = resolve(load_groups(), {}, environ={}, config=config)
    options = all_options()
    present = [name for name, opt in options.items() if any(_is_set(config, key) for key in opt.keys)]
    values = {name: settings[name] for name in present if options[name].retired is None}
    if settings["compute_environment"] == "LOCAL_MACHINE":
        values = {**{name: options[name].default for name in BASE if name not in _LEFT_OUT}, **values}
    return nest({**values, "compute_environment": settings["compute_environment"]})


class LoadedConfig(SimpleNamespace):
    """The settings of a configuration file as attributes, under the keys that this version writes."""

    def to_dict(self) -> dict[str, Any]:
        """Return the settings by key; those of an engine are nested under its section."""
        return dict(vars(self))

    def to_yaml_file(self, yaml_file: str | Path) -> None:
        """Write the settings to a file that ``accel launch --config_file`` reads."""
        write_text(Path(yaml_file), to_text(Path(yaml_file), self.to_dict()))

    to_json_file = to_yaml_file

    @classmethod
    def from_yaml_file(cls, yaml_file: str | Path | None = None) -> LoadedConfig:
        """See :func:`load_config_from_file`."""
        return load_config_from_file(yaml_file)

    from_json_file = from_yaml_file


def load_config_from_file(config_file: str | Path | None = None) -> LoadedConfig:
    """Read a configuration file.

    Args:
        config_file: the file; by default the one that ``accel launch`` reads.

    Raises:
        ConfigurationError: there is no file, it cannot be read, or a key or value is not allowed.
    """
    config = read_config(config_file)
    if config is None:
        raise ConfigurationError(f"{default_path()} does not exist. Run `accel config`, or pass the path of a file.")
    return LoadedConfig(**updated(config))


def _is_set(config: ConfigFile, key: str) -> bool:
    entry = config.entry(key)
    return entry is not None and entry.value not in (None, "")

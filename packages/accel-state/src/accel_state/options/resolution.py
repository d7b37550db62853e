"""Which setting wins: command line, then environment, then configuration file, then default, with the origin of every value."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from ..errors import ConfigurationError
from .config_file import ConfigFile
from .declare import Option, OptionGroup, read_variable

G = TypeVar("G", bound=OptionGroup)


class Source(enum.Enum):
    """Where a value comes from, the strongest first."""

    COMMAND_LINE = "command line"
    ENVIRONMENT = "environment"
    CONFIG_FILE = "config file"
    DEFAULT = "default"


@dataclass(frozen=True)
class Setting:
    """One option's value, and where it comes from.

    Attributes:
        where: the flag, the variable, the key with file and line, or "default": ready for a message.
    """

    option: Option
    value: Any
    source: Source
    where: str


@dataclass(frozen=True)
class Resolution:
    """Every option of some groups, resolved."""

    groups: tuple[type[OptionGroup], ...]
    settings: Mapping[str, Setting]

    def __getitem__(self, name: str) -> Any:
        return self.settings[name].value

    def is_set(self, name: str) -> bool:
        """Whether somebody set the option, be it to its default value."""
        return self.settings[name].source is not Source.DEFAULT

    def where(self, name: str) -> str:
        """What set the option, and to what: "--num_processes 4", "ACCELERATE_NUM_PROCESSES=4", "num_processes: 4 in f.yaml, line 3"."""
        return self.settings[name].where

    def group(self, cls: type[G]) -> G:
        """One group as an object."""
        return cls(**{opt.field: self[opt.name] for opt in cls.options()})

    def environment(self) -> dict[str, str]:
        """The variables that hand the settings to a process. An option that nobody set is not among them."""
        exported = (setting for setting in self.settings.values() if setting.option.exported and setting.source is not Source.DEFAULT)
        return {str(setting.option.env): setting.option.format(setting.value) for setting in exported}


def resolve(
    groups: Sequence[type[OptionGroup]],
    command_line: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
    config: ConfigFile | None = None,
) -> Resolution:
    """Resolve every option of the groups.

    Args:
        command_line: text or value by :attr:`Option.name`, only of what was given.
        environ: environment variables; left out, those of this process.
        config: a configuration file, or None.

    Raises:
        ConfigurationError: a value is not allowed (the message names flag, variable, or key with file and line), or
            ``command_line`` has a name that no group declares.
    """
    options = {opt.name: opt for group in groups for opt in group.options()}
    given = dict(command_line or {})
    unknown = sorted(set(given) - set(options))
    if unknown:
        raise ConfigurationError(f"{', '.join(unknown)}: no such option. Options: {', '.join(options)}.")
    settings = {name: _resolve_one(opt, given, environ, config) for name, opt in options.items()}
    return Resolution(tuple(groups), settings)


def _resolve_one(opt: Option, given: Mapping[str, Any], environ: Mapping[str, str] | None, config: ConfigFile | None) -> Setting:
    if opt.name in given:
        raw = given[opt.name]
        return Setting(opt, opt.parse(raw, opt.flags[0]), Source.COMMAND_LINE, _flag_text(opt, raw))
    value = read_variable(opt, environ)
    if value is not None:
        return Setting(opt, value, Source.ENVIRONMENT, f"{opt.env}={opt.format(value)}")
    entry = config.entry(opt.key) if config is not None and opt.key else None
    if entry is not None and entry.value is not None:
        value = opt.parse(entry.value, f"{opt.key} in {entry.place}")
        return Setting(opt, value, Source.CONFIG_FILE, f"{opt.key}: {opt.format(value)} in {entry.place}")
    return Setting(opt, opt.default, Source.DEFAULT, "default")


def _flag_text(opt: Option, raw: Any) -> str:
    if opt.is_flag:
        return opt.flags[0] if str(raw) == "true" else f"{opt.flags[0]}={raw}"
    return f"{opt.flags[0]} {raw}"

"""Resolves every option, with its source: command line, then environment, then configuration file, then default."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from ..env import all_variables
from ..errors import ConfigurationError
from ..secrets import hide_in_text
from .config_file import ConfigFile, Entry
from .declaration import Option, OptionGroup, read_variable, set_variable

G = TypeVar("G", bound=OptionGroup)

_SHOWN_CHARACTERS = 200


class Source(enum.Enum):
    """The source of a value, the strongest first."""

    COMMAND_LINE = "command line"
    ENVIRONMENT = "environment"
    CONFIG_FILE = "config file"
    DEFAULT = "default"

    @property
    def strength(self) -> int:
        """Precedence: a greater one wins; 0 for a default."""
        return len(Source) - 1 - list(Source).index(self)


@dataclass(frozen=True)
class Setting:
    """One option's value and its source."""

    option: Option
    value: Any
    source: Source
    where: str  # the flag, the variable, the key with file and line, or "default", for messages


@dataclass(frozen=True)
class Resolution:
    """Every option of some groups, resolved."""

    groups: tuple[type[OptionGroup], ...]
    settings: Mapping[str, Setting]
    file_notes: tuple[str, ...] = ()  # on the configuration file, and on variables that override it or are misspelt

    def __getitem__(self, name: str) -> Any:
        return self.settings[name].value

    def is_set(self, name: str) -> bool:
        """Return True if the option was set, even if to its default value."""
        return self.settings[name].source is not Source.DEFAULT

    def where(self, name: str) -> str:
        """Return the option's source and value: "--num_processes 4", "num_processes: 4 in f.yaml, line 3"."""
        return self.settings[name].where

    def group(self, cls: type[G]) -> G:
        """Return one group as an object."""
        return cls(**{opt.field: self[opt.name] for opt in cls.options()})

    def is_enabled(self, cls: type[OptionGroup]) -> bool:
        """Return True if a group has an effect: the option in its ``enabled_by`` has that value."""
        if cls.enabled_by is None:
            return True
        name, value = cls.enabled_by
        return name in self.settings and self[name] == value

    def environment(self) -> dict[str, str]:
        """Return the variables that pass the settings to a process.

        They contain the options that were set, and the defaults of groups that are enabled by a switch.
        """
        exported: dict[str, str] = {}
        for group in self.groups:
            with_defaults = group.enabled_by is not None and self.is_enabled(group)
            for opt in group.options():
                setting = self.settings[opt.name]
                passed = with_defaults or setting.source is not Source.DEFAULT
                if opt.exported and setting.value is not None and passed:
                    exported[str(opt.env)] = opt.format(setting.value)
        return exported

    def notes(self) -> tuple[str, ...]:
        """Messages to the user: translated keys, and settings without effect; secrets are hidden."""
        notes = list(self.file_notes)
        for name, setting in self.settings.items():
            if setting.option.retired and setting.value and self.is_set(name):
                notes.append(f"{setting.where} has no effect: {setting.option.retired}")
        for group in self.groups:
            settings = [self.settings[opt.name] for opt in group.options()]
            given = [setting for setting in settings if setting.source in (Source.COMMAND_LINE, Source.CONFIG_FILE)]
            if group.enabled_by is None:
                # Other tools write the defaults of such a group into every file.
                given = [setting for setting in given if setting.value != setting.option.default]
            name, value = group.enabled_by or group.used_with or ("", None)
            # An undecided switch, such as the precision, may still be set by the script.
            if given and name in self.settings and self[name] not in (None, value):
                more = f" (and {len(given) - 1} more of its options)" if len(given) > 1 else ""
                notes.append(f"{given[0].where}{more} has no effect without {group.switch()}")
        return tuple(map(hide_in_text, notes))

    def changed(self, *settings: Setting) -> Resolution:
        """Return a copy with some settings replaced."""
        return replace(self, settings={**self.settings, **{setting.option.name: setting for setting in settings}})


def resolve(
    groups: Sequence[type[OptionGroup]],
    command_line: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
    config: ConfigFile | None = None,
) -> Resolution:
    """Resolve every option of the groups.

    Args:
        command_line: text or value of each given flag, by :attr:`Option.name`.
        environ: environment variables; by default those of this process.
        config: a configuration file, or None.

    Raises:
        ConfigurationError: a value is not allowed (the message names flag, variable, or key with file and line), or
            ``command_line`` has a name that no group declares.
    """
    options, given = {opt.name: opt for group in groups for opt in group.options()}, dict(command_line or {})
    unknown = sorted(set(given) - set(options))
    if unknown:
        raise ConfigurationError(f"{', '.join(unknown)}: no such option. Options: {', '.join(options)}.")
    variables = all_variables() if environ is None else environ
    settings = {}
    for name, opt in options.items():
        # Most options are not set; a call for each would be most of the work of a launch.
        if config is None and name not in given and variables.keys().isdisjoint((opt.env, *opt.other_envs)):
            settings[name] = Setting(opt, opt.default, Source.DEFAULT, "default")
        else:
            settings[name] = _resolve_option(opt, given, variables, config)
    implied = {
        name: _implied(settings[name], *opt.implied_by, settings, config)
        for name, opt in options.items()
        if opt.implied_by is not None
    }
    settings |= implied
    if config is None:
        return Resolution(tuple(groups), settings)
    return Resolution(tuple(groups), settings, (*config.notes, *_overridden(settings, config)))


def _resolve_option(
    opt: Option, given: Mapping[str, Any], environ: Mapping[str, str], config: ConfigFile | None
) -> Setting:
    if opt.name in given:
        raw = given[opt.name]
        return Setting(opt, opt.parse(raw, opt.flags[0]), Source.COMMAND_LINE, _flag_text(opt, raw))
    value = read_variable(opt, environ)
    if value is not None:
        return Setting(opt, value, Source.ENVIRONMENT, f"{set_variable(opt, environ)}={_shown(opt, value)}")
    entry = _find_entry(opt, config) if config is not None else None
    if entry is not None:
        value = opt.parse(entry.value, f"{entry.key} in {entry.location}")
        return Setting(opt, value, Source.CONFIG_FILE, f"{entry.key}: {_shown(opt, value)} in {entry.location}")
    return Setting(opt, opt.default, Source.DEFAULT, "default")


def _find_entry(opt: Option, config: ConfigFile) -> Entry | None:
    """Return the file's entry under the option's key, or under a key of another version; both must agree."""
    entries = [entry for key in opt.keys if (entry := config.entry(key)) is not None and entry.value not in (None, "")]
    for other in entries[1:]:
        first = entries[0]
        value = opt.parse(first.value, f"{first.key} in {first.location}")
        if opt.parse(other.value, f"{other.key} in {other.location}") != value:
            raise ConfigurationError(
                f"{other.key}: {other.value} in {other.location} contradicts {first.key}: {first.value} in "
                f"{first.location}: both are {opt.flags[0]}. Remove one."
            )
    return entries[0] if entries else None


def _overridden(settings: Mapping[str, Setting], config: ConfigFile) -> list[str]:
    """Return notes on values of the file that differ from those of variables, which may be left from another launch."""
    notes = []
    for setting in settings.values():
        opt = setting.option
        entry = _find_entry(opt, config) if setting.source is Source.ENVIRONMENT else None
        if entry is not None:
            value = opt.parse(entry.value, f"{entry.key} in {entry.location}")
            if value != setting.value:
                notes.append(f"{setting.where} overrides {entry.key}: {_shown(opt, value)} in {entry.location}")
    return notes


def _implied(
    setting: Setting, name: str, values: tuple[Any, ...], settings: Mapping[str, Setting], config: ConfigFile | None
) -> Setting:
    """Return the setting that another option or a section of the file implies, unless it is stronger itself."""
    if name in settings:
        cause = settings[name]
        # Of equal strength, the cause wins: files hold `use_cpu: false` next to `distributed_type: MULTI_CPU`.
        holds = cause.value in values and cause.source.strength >= setting.source.strength and not setting.value
        return replace(setting, value=True, source=cause.source, where=cause.where) if holds else setting
    section = config.entry(name) if config is not None else None
    if section is None or setting.source is not Source.DEFAULT or not section.value:
        return setting
    if isinstance(section.value, Mapping) and all(value is None for value in section.value.values()):
        return setting
    return replace(setting, value=True, source=Source.CONFIG_FILE, where=f"{name} in {section.location}")


def _flag_text(opt: Option, raw: Any) -> str:
    if opt.is_flag:
        return opt.flags[0] if str(raw) == "true" else f"{opt.flags[0]}={raw}"
    return f"{opt.flags[0]} {'(hidden)' if opt.secret else raw}"


def _shown(opt: Option, value: Any) -> str:
    text = opt.shown(value)
    return text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "..."

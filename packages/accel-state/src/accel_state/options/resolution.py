"""Which setting wins: command line, then environment, then configuration file, then default, with the origin of every
value.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from ..errors import ConfigurationError
from .config_file import ConfigFile, Entry
from .option import Option, OptionGroup, read_variable

G = TypeVar("G", bound=OptionGroup)

_SHOWN_CHARACTERS = 200


class Source(enum.Enum):
    """Where a value comes from, the strongest first."""

    COMMAND_LINE = "command line"
    ENVIRONMENT = "environment"
    CONFIG_FILE = "config file"
    DEFAULT = "default"

    @property
    def strength(self) -> int:
        """The greater, the stronger; 0 for a default."""
        return len(Source) - 1 - list(Source).index(self)


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
    file_notes: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> Any:
        return self.settings[name].value

    def is_set(self, name: str) -> bool:
        """Whether somebody set the option, be it to its default value."""
        return self.settings[name].source is not Source.DEFAULT

    def where(self, name: str) -> str:
        """What set the option, and to what: "--num_processes 4", "ACCELERATE_NUM_PROCESSES=4", "num_processes: 4 in
        f.yaml, line 3".
        """
        return self.settings[name].where

    def group(self, cls: type[G]) -> G:
        """One group as an object."""
        return cls(**{opt.field: self[opt.name] for opt in cls.options()})

    def is_enabled(self, cls: type[OptionGroup]) -> bool:
        """Whether a group has an effect: that what it depends on is switched on."""
        if cls.enabled_by is None:
            return True
        name, value = cls.enabled_by
        return name in self.settings and self[name] == value

    def environment(self) -> dict[str, str]:
        """The variables that hand the settings to a process.

        An option that nobody set is not among them, unless its group is switched on: who reads FSDP_VERSION needs its
        default too.
        """
        exported: dict[str, str] = {}
        for group in self.groups:
            whole = group.enabled_by is not None and self.is_enabled(group)
            for opt in group.options():
                setting = self.settings[opt.name]
                if opt.exported and setting.value is not None and (whole or setting.source is not Source.DEFAULT):
                    exported[str(opt.env)] = opt.format(setting.value)
        return exported

    def notes(self) -> tuple[str, ...]:
        """What to tell the user: keys of other versions that were understood, and options that have no effect any more."""
        retired = [s for s in self.settings.values() if s.option.retired and s.value and s.source is not Source.DEFAULT]
        idle = [group for group in self.groups if not self.is_enabled(group)]
        return (
            *self.file_notes,
            *(f"{setting.where} has no effect: {setting.option.retired}" for setting in retired),
            *(note for group in idle if (note := self._idle_note(group)) is not None),
        )

    def _idle_note(self, group: type[OptionGroup]) -> str | None:
        """That a file sets options of a group which is not switched on."""
        found = [s for opt in group.options() if (s := self.settings[opt.name]).source is Source.CONFIG_FILE]
        if not found or group.enabled_by is None or self[group.enabled_by[0]] is None:
            return None
        switch, value = group.enabled_by
        need = f"--{switch}" if value is True else f"{switch} {value}"
        more = f" (and {len(found) - 1} more of its options)" if len(found) > 1 else ""
        return f"{found[0].where}{more} has no effect without {need}"

    def changed(self, *settings: Setting) -> Resolution:
        """The same with some settings replaced."""
        return replace(self, settings={**self.settings, **{setting.option.name: setting for setting in settings}})


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
    implied = {name: _implied(setting, settings, config) for name, setting in settings.items()}
    return Resolution(tuple(groups), implied, config.notes if config is not None else ())


def _resolve_one(
    opt: Option, given: Mapping[str, Any], environ: Mapping[str, str] | None, config: ConfigFile | None
) -> Setting:
    if opt.name in given:
        raw = given[opt.name]
        return Setting(opt, opt.parse(raw, opt.flags[0]), Source.COMMAND_LINE, _flag_text(opt, raw))
    value = read_variable(opt, environ)
    if value is not None:
        return Setting(opt, value, Source.ENVIRONMENT, f"{opt.env}={_shown(opt, value)}")
    entry = _find_entry(opt, config) if config is not None else None
    if entry is not None:
        value = opt.parse(entry.value, f"{entry.key} in {entry.place}")
        return Setting(opt, value, Source.CONFIG_FILE, f"{entry.key}: {_shown(opt, value)} in {entry.place}")
    return Setting(opt, opt.default, Source.DEFAULT, "default")


def _find_entry(opt: Option, config: ConfigFile) -> Entry | None:
    """What a file has under the option's key, or under a key that another version gave it.

    Raises:
        ConfigurationError: it has two of them, with different values.
    """
    found = [entry for key in opt.keys if (entry := config.entry(key)) is not None and entry.value not in (None, "")]
    for other in found[1:]:
        first = found[0]
        if opt.parse(other.value, f"{other.key} in {other.place}") != opt.parse(
            first.value, f"{first.key} in {first.place}"
        ):
            raise ConfigurationError(
                f"{other.key}: {other.value} in {other.place} contradicts {first.key}: {first.value} in "
                f"{first.place}: both are "
                f"{opt.flags[0]}. Remove one."
            )
    return found[0] if found else None


def _implied(setting: Setting, settings: Mapping[str, Setting], config: ConfigFile | None) -> Setting:
    """The setting that follows from another option, or from a section of the file, where it is stronger than the
    setting's own.
    """
    if setting.option.implied_by is None:
        return setting
    name, values = setting.option.implied_by
    if name in settings:
        cause = settings[name]
        # In one file `use_cpu: false` stands beside `distributed_type: MULTI_CPU`; the kind of run is what was asked
        # for.
        holds = cause.value in values and cause.source.strength >= setting.source.strength and not setting.value
        return replace(setting, value=True, source=cause.source, where=cause.where) if holds else setting
    section = config.entry(name) if config is not None else None
    # A section of which every key is null asks for nothing.
    asks = section is not None and section.value and not _is_empty(section.value)
    if section is not None and asks and setting.source is Source.DEFAULT:
        return replace(setting, value=True, source=Source.CONFIG_FILE, where=f"{name} in {section.place}")
    return setting


def _is_empty(section: Any) -> bool:
    return isinstance(section, Mapping) and all(value is None for value in section.values())


def _flag_text(opt: Option, raw: Any) -> str:
    if opt.is_flag:
        return opt.flags[0] if str(raw) == "true" else f"{opt.flags[0]}={raw}"
    return f"{opt.flags[0]} {'(hidden)' if opt.secret else raw}"


def _shown(opt: Option, value: Any) -> str:
    text = opt.shown(value)
    return text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "..."

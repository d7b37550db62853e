"""How an option is declared: once, as a dataclass field that carries its flag, variable, configuration key and help.

Everything that deals with options is derived from the declaration: the argument parser, the schema of the configuration file,
the environment handed to the processes, the object that reads it back, the tables of the documentation. Torch-free.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, TypeVar

from ..env import read_str, str_to_bool
from ..errors import ConfigurationError

G = TypeVar("G", bound="OptionGroup")

_METADATA_KEY = "accel.option"


@dataclass(frozen=True)
class Option:
    """One option: what it is called in each place, what it accepts and what it means.

    Attributes:
        field: name of the attribute in its group.
        kind: type of a value: bool, int, float or str.
        default: the value where nobody sets it; None means "not set".
        flags: spellings on the command line, the main one first, each with underscores as well as with dashes.
        env: variable that sets it, or None.
        key: key in a configuration file, ``section.key`` where it is nested; None where a file cannot set it.
        choices: the only values allowed; compared without regard to case, and stored as spelt here.
        minimum: the least number allowed.
        exported: whether the launched processes receive it (under ``env``).
        parser: turns text into the value where ``kind`` and ``choices`` do not say enough. Raises ValueError with what is allowed.
        help: what it does, for ``--help`` and the documentation.
        question: how a questionnaire asks for it, or None where it does not.
        metavar: how the value is shown in ``--help``.
    """

    field: str
    kind: type
    default: Any
    flags: tuple[str, ...]
    env: str | None
    key: str | None
    choices: tuple[str, ...] | None
    minimum: float | None
    exported: bool
    parser: Callable[[str], Any] | None
    help: str
    question: str | None
    metavar: str | None

    @property
    def name(self) -> str:
        """The main flag without its dashes, which is unique over all groups ("num_processes")."""
        return self.flags[0].lstrip("-").replace("-", "_")

    @property
    def is_flag(self) -> bool:
        """Whether it is given alone (``--cpu``) rather than with a value (``--num_processes 2``)."""
        return self.kind is bool

    def parse(self, raw: Any, where: str) -> Any:
        """The value that ``raw`` stands for.

        Args:
            raw: text, or a value that a configuration file gave.
            where: flag, variable, or key with file and line: what the message names.

        Raises:
            ConfigurationError: ``raw`` is not allowed.
        """
        try:
            value = self._convert(raw)
        except ValueError as error:
            raise ConfigurationError(f"{where}: {error}") from None
        return value

    def format(self, value: Any) -> str:
        """The text of a value, as it stands in an environment variable; :meth:`parse` reads it back."""
        return ("true" if value else "false") if self.kind is bool else str(value)

    def allowed(self) -> str:
        """What may be given, in words."""
        if self.choices is not None:
            return "one of " + ", ".join(self.choices)
        names = {bool: "true or false", int: "an integer", float: "a number", str: "text"}
        return names[self.kind] + (f" of at least {self.minimum:g}" if self.minimum is not None else "")

    def _convert(self, raw: Any) -> Any:
        if isinstance(raw, (dict, list, tuple)):
            raise ValueError(f"{raw!r} is not {self.allowed()}")
        text = str(raw).strip()
        if self.parser is not None:
            return self.parser(text)
        if self.choices is not None:
            return self._choose(text)
        if self.kind is bool:
            return bool(str_to_bool(text))
        if self.kind is str:
            return self._not_empty(text)
        return self._number(raw, text)

    def _choose(self, text: str) -> str:
        # YAML reads a bare `no` as false.
        word = "no" if text == "False" and "no" in self._lower_choices() else text
        try:
            return self._lower_choices()[word.lower()]
        except KeyError:
            raise ValueError(f"{text!r} is not {self.allowed()}") from None

    def _lower_choices(self) -> dict[str, str]:
        return {choice.lower(): choice for choice in self.choices or ()}

    def _not_empty(self, text: str) -> str:
        if not text:
            raise ValueError("the value is empty; give text, or leave the option out")
        return text

    def _number(self, raw: Any, text: str) -> Any:
        try:
            if isinstance(raw, bool):
                raise ValueError
            number = self.kind(text)
            if not math.isfinite(number):
                raise ValueError
        except ValueError:
            raise ValueError(f"{text!r} is not {self.allowed()}") from None
        if self.minimum is not None and not number >= self.minimum:
            raise ValueError(f"{text} is not {self.allowed()}")
        return number


def option(
    default: Any,
    *,
    kind: type,
    help: str,
    name: str | None = None,
    short: str | None = None,
    env: str | None = None,
    key: str | None = "",
    choices: Iterable[str] | None = None,
    minimum: float | None = None,
    exported: bool = False,
    parser: Callable[[str], Any] | None = None,
    question: str | None = None,
    metavar: str | None = None,
) -> Any:
    """A dataclass field that is an option; see :class:`Option` for the arguments.

    Args:
        name: the flag without dashes, where it is not the name of the field.
        short: one-letter alias ("-m").
        key: the configuration key; left out, it is ``name``; None means that no file can set it.
    """

    def bind(field: str) -> Option:
        flag = f"--{name or field}"
        dashed = flag[:2] + flag[2:].replace("_", "-")
        spellings = [flag, *([dashed] if dashed != flag else []), *([short] if short else [])]
        return Option(
            field=field,
            kind=kind,
            default=default,
            flags=tuple(spellings),
            env=env,
            key=(name or field) if key == "" else key,
            choices=tuple(choices) if choices is not None else None,
            minimum=minimum,
            exported=exported,
            parser=parser,
            help=help,
            question=question,
            metavar=metavar,
        )

    return dataclasses.field(default=default, metadata={_METADATA_KEY: bind})


@dataclass(frozen=True)
class OptionGroup:
    """Options that belong together. A subclass is a frozen dataclass whose fields are all made by :func:`option`."""

    title: ClassVar[str] = ""
    description: ClassVar[str] = ""
    _declared: ClassVar[tuple[Option, ...]]

    @classmethod
    def options(cls) -> tuple[Option, ...]:
        """The declarations, in order."""
        # Kept on the class itself: a subclass with more fields must not find its parent's list.
        if "_declared" not in vars(cls):
            cls._declared = tuple(field.metadata[_METADATA_KEY](field.name) for field in fields(cls))
        return cls._declared

    @classmethod
    def from_environment(cls: type[G], environ: Mapping[str, str] | None = None) -> G:
        """Read the group from environment variables; an option whose variable is unset or empty has its default.

        Args:
            environ: the variables; left out, those of this process.

        Raises:
            ConfigurationError: a variable holds something that is not allowed; the message names it.
        """
        return cls(**{opt.field: value for opt in cls.options() if (value := read_variable(opt, environ)) is not None})

    @classmethod
    def from_mapping(cls: type[G], mapping: Mapping[str, Any]) -> G:
        """Read the group from configuration keys (nested sections as nested mappings); keys of other groups are left alone.

        Raises:
            ConfigurationError: a value is not allowed; the message names its key.
        """
        found = {opt.field: opt.parse(raw, opt.key or "") for opt in cls.options() if (raw := look_up(mapping, opt.key)) is not None}
        return cls(**found)

    def to_environment(self) -> dict[str, str]:
        """The variables that hand this group to a process; what has its default is left out."""
        values = ((opt, getattr(self, opt.field)) for opt in self.options() if opt.exported)
        return {str(opt.env): opt.format(value) for opt, value in values if value is not None and value != opt.default}

    @classmethod
    def add_to_parser(cls, parser: argparse.ArgumentParser) -> None:
        """Add the group's flags. Each is stored, as text, under :attr:`Option.name`, and only where it was given."""
        section = parser.add_argument_group(cls.title, cls.description or None)
        for opt in cls.options():
            add_argument(section, opt)


def add_argument(section: argparse._ArgumentGroup, opt: Option) -> None:
    """Add one option's flags; a yes-or-no option may be given alone, or as ``--flag=false`` to undo a variable or a file."""
    notes = describe(opt)
    text = f"{opt.help}{notes}".replace("%", "%%")
    # Text only: the value is checked in one place, for command line, environment and file alike.
    if opt.is_flag:
        section.add_argument(*opt.flags, dest=opt.name, nargs="?", const="true", default=argparse.SUPPRESS, metavar="BOOL", help=text)
    else:
        metavar = opt.metavar or ("{" + ",".join(opt.choices) + "}" if opt.choices and len(opt.choices) < 6 else opt.kind.__name__.upper())
        section.add_argument(*opt.flags, dest=opt.name, default=argparse.SUPPRESS, metavar=metavar, help=text)


def describe(opt: Option) -> str:
    """What follows the help text: choices that the metavar is too short for, the default, the variable and the key."""
    notes = []
    if opt.choices and len(opt.choices) >= 6:
        notes.append("one of " + ", ".join(opt.choices))
    if opt.default not in (None, False, ""):
        notes.append(f"default: {opt.default}")
    if opt.env:
        notes.append(f"variable {opt.env}")
    if opt.key and opt.key != opt.name:
        notes.append(f"key {opt.key}")
    return f" ({'; '.join(notes)})" if notes else ""


def read_variable(opt: Option, environ: Mapping[str, str] | None = None) -> Any:
    """The option's value from its variable; None where the variable is unset or empty, or there is none."""
    raw = read_str(opt.env, environ=environ) if opt.env else None
    return None if raw is None else opt.parse(raw, f"environment variable {opt.env}")


def look_up(mapping: Mapping[str, Any], key: str | None) -> Any:
    """What a configuration mapping holds under a key, which may be ``section.key``; None where there is nothing."""
    found: Any = mapping
    for part in key.split(".") if key else ():
        if not isinstance(found, Mapping):
            return None
        found = found.get(part)
    return found if key else None

"""Declares an option once, as a dataclass field that carries its flag, variable, configuration key and help.

Everything that deals with options derives from the declaration: the argument parser, the schema of the configuration
file, the environment of the launched processes, the object that reads it back, the documentation tables. Torch-free.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from ..env import all_variables, read_str, str_to_bool
from ..errors import ConfigurationError

_KIND_NAMES = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "text",
    tuple: "a list of texts",
    dict: 'a mapping, such as {"name": 1}',
}


def _clean_text(text: str) -> str:
    if not text:
        raise ValueError("the value is empty; give text, or leave the option out")
    if any(ord(letter) < 32 or ord(letter) == 127 for letter in text):
        raise ValueError(f"{text!r} contains a control character; give text on one line")
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        raise ValueError(f"{text!r} contains a character that cannot be encoded") from None
    return text


G = TypeVar("G", bound="OptionGroup")

_METADATA_KEY = "accel.option"
_KINDS: dict[str, type] = {kind.__name__: kind for kind in (bool, int, float, str, tuple, dict)}
_METAVARS = {bool: "BOOL", int: "N", float: "NUMBER", str: "TEXT", tuple: "TEXT", dict: "JSON"}

# Conditions of ``Option.asked_when`` that are not values: the answer is a number above one; and it is no range of
# machines; there is any answer.
MORE_THAN_ONE = "> 1"
NO_RANGE = "no range"
GIVEN = "given"


@dataclass(frozen=True, kw_only=True)
class Option:
    """One option: its names, the values that it accepts and what it does."""

    name: str  # the main flag without its dashes, which is unique over all groups ("num_processes")
    field: str  # name of the attribute in its group
    kind: type  # type of a value: bool, int, float, str, tuple (of texts) or dict
    default: Any  # the value when the option is not set; None means "not set"
    flags: tuple[str, ...]  # spellings on the command line, the main one first, each with underscores and with dashes
    undo_flags: tuple[str, ...]  # flags without a value that set a boolean option to false
    env: str | None  # environment variable that sets it, or None
    key: str | None  # key in a configuration file, ``section.key`` if nested; None if a file cannot set it
    metavar: str  # how the value is shown in ``--help``
    help: str  # what it does, for ``--help`` and the documentation
    other_keys: tuple[str, ...] = ()  # keys of files written by other versions of this format, each read as ``key`` is
    other_envs: tuple[str, ...] = ()  # variables of other launchers, which set it where ``env`` does not
    exported: bool = False  # whether the launched processes receive it (under ``env``)
    alone: bool = True  # whether a boolean option may be given without a value (``--cpu``)
    # another option, and its values that set this one to true unless this one is set
    implied_by: tuple[str, tuple[Any, ...]] | None = None
    retired: str | None = None  # why the option has no effect any more, for a note to the user; None for all others
    secret: bool = False  # whether its value must not be shown or stored
    question: str | None = None  # how a questionnaire asks for it, or None if it does not
    # the question is asked if, for each option named here, the answer is among these values
    asked_when: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    suggested: Any = None  # the questionnaire's proposal, if that is not the default

    # the only values allowed; compared without regard to case, and stored as spelled here
    choices: tuple[str, ...] | None = None
    synonyms: Mapping[str, str] = dataclasses.field(default_factory=dict)  # other spellings of choices
    minimum: float | None = None  # lower bound of a number, inclusive
    maximum: float | None = None  # upper bound of a number, inclusive
    # turns text into the value where ``kind`` and ``choices`` are not enough. Raises ValueError
    parser: Callable[[str], Any] | None = None
    separated: bool = False  # whether a text is a list of names with commas between them, and may be given as a list

    @property
    def is_flag(self) -> bool:
        """True if it is given alone (``--cpu``) rather than with a value (``--num_processes 2``)."""
        return self.kind is bool and self.alone

    @property
    def keys(self) -> tuple[str, ...]:
        """Every key that sets it, the main one first."""
        return (self.key, *self.other_keys) if self.key else ()

    def parse(self, raw: Any, where: str) -> Any:
        """Read a value; ``where`` is the flag, variable, or key with file and line, for the message."""
        try:
            return self.convert(raw)
        except ValueError as error:
            raise ConfigurationError(f"{where}: {'the value is not allowed' if self.secret else error}") from None

    def shown(self, value: Any) -> str:
        """Return the text of a value for display; a secret is hidden."""
        return "(hidden)" if self.secret else self.format(value)

    def allowed(self) -> str:
        """Describe the accepted values, for messages."""
        if self.choices is not None:
            return "one of " + ", ".join(self.choices)
        if self.maximum is not None:
            return f"{_KIND_NAMES[self.kind]} from {self.minimum or 0:g} to {int(self.maximum)}"
        return _KIND_NAMES[self.kind] + (f" of at least {self.minimum:g}" if self.minimum is not None else "")

    def convert(self, raw: Any) -> Any:
        """Read a value from text, or from what a configuration file holds; raises ValueError with what is allowed."""
        if self.kind is tuple:
            return self._texts(raw)
        if self.kind is dict:
            return self._mapping(raw)
        if (self.parser is not None or self.separated) and isinstance(raw, (list, tuple)):
            if self.separated and not all(isinstance(entry, str) for entry in raw):
                raise ValueError(f"{raw!r} is not a list of names")
            raw = ",".join(map(str, raw))  # the form that the value has in an environment variable
        if isinstance(raw, (dict, list, tuple)):
            raise self._not_allowed(raw)
        text = str(raw).strip()
        if self.parser is not None:
            return self.parser(text)
        if self.choices is not None:
            return self._choose(text)
        if self.kind is bool:
            return bool(str_to_bool(text))
        return _clean_text(text) if self.kind is str else self._number(raw, text)

    def format(self, value: Any) -> str:
        """Write a value as text, as it is stored in an environment variable; :meth:`convert` reads it back."""
        if self.kind is bool:
            return "true" if value else "false"
        return json.dumps(value) if self.kind in (tuple, dict) else str(value)

    def check(self, name: str, value: Any) -> Any:
        """Check the value of an argument in code, where a bool is not an int and text is not a number."""
        expected: Any = (int, float) if self.kind is float else self.kind
        if self.parser is not None:
            expected = object
        if self.choices is not None:
            expected = (str, self.kind)
        try:
            if not isinstance(value, expected) or (isinstance(value, bool) and self.kind in (int, float)):
                raise self._not_allowed(value)
            return self.convert(value)
        except ValueError as error:
            problem = f": {error}" if self.parser is not None else f" is not {self.allowed()}."
            raise ConfigurationError(f"{name}={value!r}{problem}") from None

    def _not_allowed(self, raw: Any) -> ValueError:
        return ValueError(f"{raw!r} is not {self.allowed()}")

    def _choose(self, text: str) -> Any:
        spellings = {choice.lower(): choice for choice in self.choices or ()}
        spellings.update({synonym.lower(): choice for synonym, choice in self.synonyms.items()})
        # YAML reads a bare `no` as false.
        spelling = "no" if text == "False" and "no" in spellings else text.lower()
        if spelling not in spellings:
            raise self._not_allowed(text)
        return self.kind(spellings[spelling])

    def _number(self, raw: Any, text: str) -> Any:
        try:
            number = self.kind(text)
            valid = math.isfinite(number) and not isinstance(raw, bool)
        except (ValueError, OverflowError):
            valid = False
        if not valid or not (self.minimum is None or number >= self.minimum):
            raise self._not_allowed(text)
        if self.maximum is not None and number > self.maximum:
            raise self._not_allowed(text)
        return number

    def _texts(self, raw: Any) -> tuple[str, ...]:
        """Read a list, a list written as JSON, or a single text."""
        if isinstance(raw, str) and raw.strip().startswith("["):
            raw = self._literal(raw)
        entries = [raw] if isinstance(raw, str) else raw
        if not isinstance(entries, Sequence) or not all(isinstance(entry, (str, int, float)) for entry in entries):
            raise self._not_allowed(raw)
        return tuple(_clean_text(str(entry).strip()) for entry in entries)

    def _mapping(self, raw: Any) -> dict[str, Any]:
        value = self._literal(raw) if isinstance(raw, str) else raw
        if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
            raise self._not_allowed(raw)
        return dict(value)

    def _literal(self, text: str) -> Any:
        with suppress(ValueError, RecursionError):
            return json.loads(text)
        try:
            return ast.literal_eval(text)  # the repr of a Python value is accepted too
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            raise self._not_allowed(text) from None


def option(
    default: Any = None,
    *,
    help: str,
    kind: type | None = None,
    choices: Iterable[str] | None = None,
    name: str | None = None,
    prefix: str = "",
    short: str | None = None,
    also: Iterable[str] = (),
    undo: str | None = None,
    env: str | None = "",
    env_prefix: str = "ACCELERATE_",
    key: str | None = "",
    section: str | None = None,
    prefixed_keys: bool = True,
    metavar: str | None = None,
    **attributes: Any,
) -> Any:
    """Declare a dataclass field that is an option.

    A group whose options share a prefix or a section binds them with ``functools.partial``.

    Args:
        kind: type of a value; by default from the field's annotation.
        name: the flag without dashes; by default ``prefix`` and the name of the field.
        prefix: start of the flag's name, added unless the field already begins with it ("fsdp_").
        short: one-letter alias ("-m").
        also: further names of the flag, without dashes.
        undo: name, without dashes, of a flag that sets a boolean option to false.
        env: the variable; by default ``env_prefix`` and the field in upper case; None: no variable.
        env_prefix: start of the variable's name.
        key: the configuration key; by default ``name``, inside ``section``; None: no file can set it.
        section: section of the configuration file that holds the key ("fsdp_config").
        prefixed_keys: whether keys in the section carry the flag's prefix.
        **attributes: of :class:`Option`.
    """

    def bind(field: str, annotation: str) -> Option:
        base = field.removeprefix(prefix)
        flag = name or prefix + base
        stored = flag if prefixed_keys else field
        value_kind = kind or _KINDS[re.split(r"\W", annotation)[0]]
        allowed = tuple(choices) if choices is not None else None
        listed = "{" + ",".join(allowed) + "}" if allowed and len(allowed) < 6 else _METAVARS[value_kind]
        spellings: list[str] = []
        for spelled in (flag, *also):
            spellings += dict.fromkeys((f"--{spelled}", f"--{spelled.replace('_', '-')}"))
        return Option(
            kind=value_kind,
            choices=allowed,
            name=flag.replace("-", "_"),
            field=field,
            default=default,
            flags=(*spellings, short) if short else tuple(spellings),
            undo_flags=tuple(dict.fromkeys((f"--{undo}", f"--{undo.replace('_', '-')}"))) if undo else (),
            env=env_prefix + base.upper() if env == "" else env,
            key=(f"{section}.{stored}" if section else stored) if key == "" else key,
            metavar=metavar or listed,
            help=help,
            **attributes,
        )

    return dataclasses.field(default=default, metadata={_METADATA_KEY: bind})


@dataclass(frozen=True)
class OptionGroup:
    """Options that belong together. A subclass is a frozen dataclass whose fields are all made by :func:`option`."""

    title: ClassVar[str] = ""  # heading in ``--help`` and in the documentation
    description: ClassVar[str] = ""  # a sentence under it
    # the option, and its value, without which the group has no effect, or None. While it is enabled, every
    # exported option of the group that is not None reaches the processes, defaults included
    enabled_by: ClassVar[tuple[str, Any] | None] = None
    # the same for a group whose defaults do not reach the processes, and that the script may use by itself
    used_with: ClassVar[tuple[str, Any] | None] = None
    _declared: ClassVar[dict[str, Option]] = {}

    def __init_subclass__(cls) -> None:
        made = {}
        for name, value in vars(cls).items():
            if isinstance(value, dataclasses.Field):
                annotation = cls.__annotations__[name]
                made[name] = value.metadata[_METADATA_KEY](name, getattr(annotation, "__name__", str(annotation)))
        cls._declared = {**cls._declared, **made}

    @classmethod
    def options(cls) -> tuple[Option, ...]:
        """Return the declarations, in order."""
        return tuple(cls._declared.values())

    @classmethod
    def switch(cls) -> str:
        """Return the command line that enables the group ("--use_fsdp"), for messages."""
        name, value = cls.enabled_by or cls.used_with or ("", None)
        return f"--{name}" if value is True else f"--{name} {value}"

    @classmethod
    def declaration(cls, field: str) -> Option:
        """Return a field's declaration: choices, default, variable and help, for a plugin with the same setting."""
        return cls._declared[field]

    @classmethod
    def read(cls, field: str, environ: Mapping[str, str] | None = None) -> Any:
        """Read one field from its environment variable; its default if the variable is unset or empty."""
        opt = cls._declared[field]
        value = read_variable(opt, environ)
        return opt.default if value is None else value

    @classmethod
    def from_environment(
        cls: type[G], environ: Mapping[str, str] | None = None, only: Iterable[str] | None = None
    ) -> G:
        """Read the group, or ``only`` these fields, from environment variables; the rest leave the default."""
        present = set(all_variables() if environ is None else environ)
        values = {}
        for opt in map(cls._declared.__getitem__, only or cls._declared):
            if not present.isdisjoint((opt.env, *opt.other_envs)):
                values[opt.field] = cls.read(opt.field, environ)
        return cls(**values)

    @classmethod
    def from_mapping(cls: type[G], mapping: Mapping[str, Any]) -> G:
        """Read the group from configuration keys, with sections as nested mappings; other keys are ignored."""
        values = {
            opt.field: opt.parse(raw, key)
            for opt in cls.options()
            for key in reversed(opt.keys)
            if (raw := look_up(mapping, key)) is not None
        }
        return cls(**values)

    @classmethod
    def add_to_parser(cls, parser: argparse.ArgumentParser, leave_out: Iterable[str] = ()) -> None:
        """Add the group's flags, except for options of the names in ``leave_out``."""
        section = parser.add_argument_group(cls.title, cls.description or None)
        for opt in cls.options():
            if opt.name not in leave_out:
                add_argument(section, opt)


def add_argument(parser: argparse._ActionsContainer, opt: Option) -> None:
    """Add one option's flags to a parser or a group of it; each is stored as text, under :attr:`Option.name`, if given.

    A boolean one may be given alone, or as ``--flag=false`` to override a file.
    """
    text = f"{opt.help}{describe(opt)}".replace("%", "%%")
    # Stored as text: one place checks values of the command line, the environment and files alike.
    settings: dict[str, Any] = {"dest": opt.name, "default": argparse.SUPPRESS}
    if opt.is_flag:
        parser.add_argument(*opt.flags, nargs="?", const="true", metavar="BOOL", help=text, **settings)
    else:
        action = "append" if opt.kind is tuple else "store"
        parser.add_argument(*opt.flags, action=action, metavar=opt.metavar, help=text, **settings)
    if opt.undo_flags:
        text = f"The same as {opt.flags[0]}=false."
        parser.add_argument(*opt.undo_flags, action="store_const", const="false", help=text, **settings)


def describe(opt: Option) -> str:
    """Return the end of the help text: choices too long for the metavar, the default, the variable and the key."""
    notes = []
    if opt.choices and len(opt.choices) >= 6:
        notes.append("one of " + ", ".join(opt.choices))
    if opt.default not in (None, "", ()) and not (opt.is_flag and opt.default is False):
        notes.append(f"default: {opt.format(opt.default)}")
    if opt.env:
        notes.append(f"variable {opt.env}")
    if opt.key and opt.key != opt.name:
        notes.append(f"key {opt.key}")
    return f" ({'; '.join(notes)})" if notes else ""


def read_variable(opt: Option, environ: Mapping[str, str] | None = None) -> Any:
    """Return the option's value from its variable; None if the option has none, or it is unset or empty."""
    name = set_variable(opt, environ)
    return None if name is None else opt.parse(read_str(name, environ=environ), f"environment variable {name}")


def set_variable(opt: Option, environ: Mapping[str, str] | None = None) -> str | None:
    """Return the name of the variable that sets the option; None if there is none, or it is empty."""
    for name in (opt.env, *opt.other_envs):
        if name and read_str(name, environ=environ) is not None:
            return name
    return None


def look_up(mapping: Mapping[str, Any], key: str | None) -> Any:
    """Return the value at a key of nested mappings, which may be ``section.key``; None if there is none."""
    value: Any = mapping
    for part in key.split(".") if key else ():
        if not isinstance(value, Mapping):
            return None
        value = value.get(part)
    return value if key else None

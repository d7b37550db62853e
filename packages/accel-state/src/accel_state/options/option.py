"""How an option is declared: once, as a dataclass field that carries its flag, variable, configuration key and help.

Everything that deals with options is derived from the declaration: the argument parser, the schema of the configuration
file, the environment handed to the processes, the object that reads it back, the tables of the documentation.
Torch-free.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, TypeVar

from ..env import read_str
from ..errors import ConfigurationError
from .parsing import allowed, convert, to_text

G = TypeVar("G", bound="OptionGroup")

_METADATA_KEY = "accel.option"

# In ``Option.asked_when``, beside values: the answer is a number above one; there is an answer at all.
MORE_THAN_ONE = "> 1"
GIVEN = "given"


@dataclass(frozen=True)
class Option:
    """One option: what it is called in each place, what it accepts and what it means.

    Attributes:
        field: name of the attribute in its group.
        kind: type of a value: bool, int, float, str, tuple (of texts) or dict.
        default: the value where nobody sets it; None means "not set".
        flags: spellings on the command line, the main one first, each with underscores as well as with dashes.
        undo_flags: spellings, given alone, that set a yes-or-no option to false.
        env: variable that sets it, or None.
        key: key in a configuration file, ``section.key`` where it is nested; None where a file cannot set it.
        other_keys: keys of files written by other versions of this format, each read as ``key`` is.
        choices: the only values allowed; compared without regard to case, and stored as spelt here.
        synonyms: other words for choices.
        minimum: the least number allowed.
        exported: whether the launched processes receive it (under ``env``).
        alone: whether a yes-or-no option may be given without a value (``--cpu``).
        implied_by: an option whose having one of some values sets this one to true, where nobody sets this one.
        retired: why it has no effect any more, for a note to whoever sets it; None for all others.
        secret: whether its value must not be shown or stored.
        parser: turns text into the value where ``kind`` and ``choices`` do not say enough. Raises ValueError with what
            is allowed.
        help: what it does, for ``--help`` and the documentation.
        question: how a questionnaire asks for it, or None where it does not.
        asked_when: values, by option, of which each must be among the answers for the question to be asked.
        suggested: what the questionnaire proposes, where that is not the default.
        metavar: how the value is shown in ``--help``.
    """

    field: str
    kind: type
    default: Any
    flags: tuple[str, ...]
    undo_flags: tuple[str, ...]
    env: str | None
    key: str | None
    other_keys: tuple[str, ...]
    choices: tuple[str, ...] | None
    synonyms: Mapping[str, str]
    minimum: float | None
    exported: bool
    alone: bool
    implied_by: tuple[str, tuple[Any, ...]] | None
    retired: str | None
    secret: bool
    parser: Callable[[str], Any] | None
    help: str
    question: str | None
    asked_when: Mapping[str, tuple[Any, ...]]
    suggested: Any
    metavar: str | None

    @property
    def name(self) -> str:
        """The main flag without its dashes, which is unique over all groups ("num_processes")."""
        return self.flags[0].lstrip("-").replace("-", "_")

    @property
    def is_flag(self) -> bool:
        """Whether it is given alone (``--cpu``) rather than with a value (``--num_processes 2``)."""
        return self.kind is bool and self.alone

    @property
    def keys(self) -> tuple[str, ...]:
        """Every key that sets it, the main one first."""
        return (self.key, *self.other_keys) if self.key else ()

    def parse(self, raw: Any, where: str) -> Any:
        """The value that ``raw`` stands for.

        Args:
            raw: text, or a value that a configuration file gave.
            where: flag, variable, or key with file and line: what the message names.

        Raises:
            ConfigurationError: ``raw`` is not allowed.
        """
        try:
            return convert(self, raw)
        except ValueError as error:
            raise ConfigurationError(f"{where}: {'the value is not allowed' if self.secret else error}") from None

    def format(self, value: Any) -> str:
        """The text of a value, as it stands in an environment variable; :meth:`parse` reads it back."""
        return to_text(self, value)

    def shown(self, value: Any) -> str:
        """The text of a value for the eyes of people: a secret is hidden."""
        return "(hidden)" if self.secret else self.format(value)

    def allowed(self) -> str:
        """What may be given, in words."""
        return allowed(self)


def option(
    default: Any,
    *,
    kind: type,
    help: str,
    name: str | None = None,
    short: str | None = None,
    also: Iterable[str] = (),
    undo: str | None = None,
    env: str | None = None,
    key: str | None = "",
    other_keys: Iterable[str] = (),
    choices: Iterable[str] | None = None,
    synonyms: Mapping[str, str] | None = None,
    minimum: float | None = None,
    exported: bool = False,
    alone: bool = True,
    implied_by: tuple[str, tuple[Any, ...]] | None = None,
    retired: str | None = None,
    secret: bool = False,
    parser: Callable[[str], Any] | None = None,
    question: str | None = None,
    asked_when: Mapping[str, tuple[Any, ...]] | None = None,
    suggested: Any = None,
    metavar: str | None = None,
) -> Any:
    """A dataclass field that is an option; see :class:`Option` for the arguments.

    Args:
        name: the flag without dashes, where it is not the name of the field.
        short: one-letter alias ("-m").
        also: further names of the flag, without dashes.
        undo: name, without dashes, of a flag that sets a yes-or-no option to false.
        key: the configuration key; left out, it is ``name``; None means that no file can set it.
    """

    def bind(field: str) -> Option:
        spellings = [spelling for flag in (name or field, *also) for spelling in _spell(flag)]
        return Option(
            field=field,
            kind=kind,
            default=default,
            flags=(*spellings, short) if short else tuple(spellings),
            undo_flags=_spell(undo) if undo else (),
            env=env,
            key=(name or field) if key == "" else key,
            other_keys=tuple(other_keys),
            choices=tuple(choices) if choices is not None else None,
            synonyms=dict(synonyms or {}),
            minimum=minimum,
            exported=exported,
            alone=alone,
            implied_by=implied_by,
            retired=retired,
            secret=secret,
            parser=parser,
            help=help,
            question=question,
            asked_when=dict(asked_when or {}),
            suggested=suggested,
            metavar=metavar,
        )

    return dataclasses.field(default=default, metadata={_METADATA_KEY: bind})


def in_section(section: str, prefix: str, exported: bool = True) -> Callable[..., Any]:
    """Make a maker of options that stand together in a section of a file.

    Args:
        section: the section ("fsdp_config").
        prefix: what the names of its options begin with ("fsdp_").
        exported: whether the launched processes receive them.

    Returns:
        A function like :func:`option` whose second argument is the name without the prefix; flag, key and (where
        ``env`` does not say otherwise) variable follow from it, and a yes-or-no option takes a value.
    """

    def make(default: Any, short_name: str, *, env: str | None = None, **declaration: Any) -> Any:
        name = prefix + short_name
        return option(
            default,
            name=name,
            env=env or name.upper(),
            key=f"{section}.{name}",
            exported=exported,
            alone=False,
            **declaration,
        )

    return make


def _spell(flag: str) -> tuple[str, ...]:
    dashed = flag.replace("_", "-")
    return (f"--{flag}", f"--{dashed}") if dashed != flag else (f"--{flag}",)


@dataclass(frozen=True)
class OptionGroup:
    """Options that belong together. A subclass is a frozen dataclass whose fields are all made by :func:`option`.

    Attributes:
        title: heading in ``--help`` and in the documentation.
        description: a sentence under it.
        enabled_by: the option, and its value, without which the group has no effect, or None. With it every option of
            the group that is exported and not None reaches the processes, also with its default.
    """

    title: ClassVar[str] = ""
    description: ClassVar[str] = ""
    enabled_by: ClassVar[tuple[str, Any] | None] = None
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
        """Read the group from configuration keys (nested sections as nested mappings); keys of other groups are left
        alone.

        Raises:
            ConfigurationError: a value is not allowed; the message names its key.
        """
        found = {
            opt.field: opt.parse(raw, key)
            for opt in cls.options()
            for key in reversed(opt.keys)
            if (raw := look_up(mapping, key)) is not None
        }
        return cls(**found)

    def to_environment(self) -> dict[str, str]:
        """The variables that hand this group to a process; what has its default is left out."""
        values = ((opt, getattr(self, opt.field)) for opt in self.options() if opt.exported)
        return {str(opt.env): opt.format(value) for opt, value in values if value is not None and value != opt.default}

    @classmethod
    def add_to_parser(cls, parser: argparse.ArgumentParser, leave_out: Iterable[str] = ()) -> None:
        """Add the group's flags. Each is stored, as text, under :attr:`Option.name`, and only where it was given.

        Args:
            leave_out: names of options that the parser has of its own.
        """
        section = parser.add_argument_group(cls.title, cls.description or None)
        for opt in cls.options():
            if opt.name not in leave_out:
                add_argument(section, opt)


def add_argument(section: argparse._ArgumentGroup, opt: Option) -> None:
    """Add one option's flags; a yes-or-no option may be given alone, or as ``--flag=false`` to undo a variable or a
    file.
    """
    text = f"{opt.help}{describe(opt)}".replace("%", "%%")
    # Text only: the value is checked in one place, for command line, environment and file alike.
    settings: dict[str, Any] = {"dest": opt.name, "default": argparse.SUPPRESS}
    if opt.is_flag:
        section.add_argument(*opt.flags, nargs="?", const="true", metavar="BOOL", help=text, **settings)
    else:
        action = "append" if opt.kind is tuple else "store"
        section.add_argument(*opt.flags, action=action, metavar=_metavar(opt), help=text, **settings)
    if opt.undo_flags:
        section.add_argument(
            *opt.undo_flags, action="store_const", const="false", help=f"The same as {opt.flags[0]}=false.", **settings
        )


def _metavar(opt: Option) -> str:
    if opt.metavar:
        return opt.metavar
    if opt.choices and len(opt.choices) < 6:
        return "{" + ",".join(opt.choices) + "}"
    return {bool: "BOOL", tuple: "TEXT", dict: "JSON"}.get(opt.kind, opt.kind.__name__.upper())


def describe(opt: Option) -> str:
    """What follows the help text: choices that the metavar is too short for, the default, the variable and the key."""
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

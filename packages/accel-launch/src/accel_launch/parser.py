"""The command line of ``accel launch``: options, then the script, then everything else belongs to the script."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from accel_state.errors import ConfigurationError
from accel_state.options import Option, load_groups

from .suggestions import suggest

EPILOG = """\
Settings: the command line wins over environment variables, these over the configuration file, this over the defaults.
A yes-or-no option is given alone (--cpu), or as --cpu=false to undo what a variable or the file says.

How many processes: --num_processes; left out, one for each visible GPU, or a single one where there is no GPU or --cpu is given.
CPU threads: with several processes OMP_NUM_THREADS is set to physical cores / processes of this machine, unless it is set already.
Port: with one machine any free port is used, so several launches on one host do not meet.

The exit code is that of the script; of several processes, that of the one that failed first. 2 means that the command line is wrong.
"""


@dataclass(frozen=True)
class CommandLine:
    """A command line, taken apart.

    Attributes:
        options: text by option name, only of what was given; a list of texts where an option may be given several
            times.
        script: the script, module or executable; None with ``--help``.
        script_args: its arguments, untouched.
    """

    options: dict[str, Any]
    script: str
    script_args: list[str]


class ConfigParser(argparse.ArgumentParser):
    """A parser whose complaints are errors of ours, shown as one line."""

    def error(self, message: str) -> NoReturn:
        raise ConfigurationError(f"{message}. `{self.prog} --help` lists the options.")


def build_parser() -> argparse.ArgumentParser:
    """The parser, made from the declarations of the options."""
    parser = ConfigParser(
        prog="accel launch",
        usage="accel launch [options] script [arguments of the script]",
        epilog=EPILOG,
        allow_abbrev=False,
        description="Start a script on one or many processes, on one or many machines.",
        formatter_class=_HelpFormatter,
    )
    for group in load_groups():
        group.add_to_parser(parser)
    return parser


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Shows the main spelling of a flag and its short one; those with dashes work too and would only double the list."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        shown = [
            flag
            for flag in action.option_strings
            if not (flag.startswith("--") and flag.replace("-", "_") != "__" + flag[2:])
        ]
        if action.nargs in (0, "?"):
            return ", ".join(shown or action.option_strings)
        return f"{', '.join(shown)} {self._format_args(action, str(action.metavar))}"


def parse(argv: Sequence[str]) -> CommandLine:
    """Take a command line apart. ``--help`` prints the help and leaves with SystemExit(0).

    Raises:
        ConfigurationError: an unknown option, an option without its value, or no script.
    """
    options = _by_flag()
    end = _find_script(argv, options)
    parser = build_parser()
    # Only what stands before the script is parsed: the script's own arguments may look like ours, and even hold a `--`.
    given = vars(parser.parse_args([word for word in argv[:end] if word != "--"]))
    if end >= len(argv):
        raise ConfigurationError("no script is given. Usage: accel launch [options] script [arguments of the script].")
    return CommandLine(_texts(given), argv[end], list(argv[end + 1 :]))


def parse_options(argv: Sequence[str], parser: argparse.ArgumentParser) -> dict[str, Any]:
    """The options of a command that takes no script, by name; ``parser`` may have positional arguments of its own.

    Raises:
        ConfigurationError: an unknown option, or an option without its value.
    """
    known = [flag for action in parser._actions for flag in action.option_strings]
    for word in argv:
        flag = word.partition("=")[0]
        if flag.startswith("--") and flag not in known:
            raise ConfigurationError(
                f"{flag} is not an option.{suggest(flag, sorted(known))} `{parser.prog} --help` lists the options."
            )
    return _texts(vars(parser.parse_args(list(argv))))


def _texts(given: Mapping[str, Any]) -> dict[str, Any]:
    # One text of an option that may come several times can be the whole list, written in JSON.
    return {name: value[0] if isinstance(value, list) and len(value) == 1 else value for name, value in given.items()}


def _by_flag() -> dict[str, Option]:
    return {flag: opt for group in load_groups() for opt in group.options() for flag in (*opt.flags, *opt.undo_flags)}


def _find_script(argv: Sequence[str], options: dict[str, Option]) -> int:
    """The index of the first word that is neither an option nor an option's value."""
    index = 0
    while index < len(argv):
        word = argv[index]
        if word == "--":
            return index + 1
        if not word.startswith("-") or word == "-":
            return index
        index += 1 + _takes_next(word, options, is_last=index + 1 == len(argv))
    return index


def _takes_next(word: str, options: dict[str, Option], is_last: bool) -> bool:
    """Whether the word after an option is its value."""
    flag, sign, _ = word.partition("=")
    if flag in ("-h", "--help"):
        return False
    if flag not in options:
        # A short option may have its value attached: -t3.
        if not word.startswith("--") and word[:2] in options and not options[word[:2]].is_flag:
            return False
        raise ConfigurationError(
            f"{flag} is not an option.{suggest(flag, sorted(options))} `accel launch --help` lists the options."
        )
    if sign or options[flag].is_flag or flag in options[flag].undo_flags:
        return False
    if is_last:
        raise ConfigurationError(f"{flag} needs a value: {options[flag].allowed()}.")
    return True

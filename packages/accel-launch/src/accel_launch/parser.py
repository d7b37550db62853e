"""The command line of ``accel launch``: options, the script, and the script's arguments."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from accel_state.errors import ConfigurationError
from accel_state.options.declaration import Option, add_argument
from accel_state.options.registry import all_options, load_groups

from .errors import suggest

EPILOG = """\
Settings: the command line overrides environment variables, these the configuration file, and this the defaults.
Flags without a value (--cpu) can be switched off: --cpu=false overrides a variable or the file.

Processes: --num_processes counts those of all machines. Default: one per visible GPU, or one per machine on the CPU.
CPU threads: with several processes, OMP_NUM_THREADS is set to physical cores / local processes, if it is not set.
Port: on a single machine, any free port is used, so several launches can run at the same time.

Exit code: that of the script, or of the process that failed first; 2 for an error in the command line.
"""


@dataclass(frozen=True)
class CommandLine:
    """A parsed command line."""

    # text by option name, for the options given; a list of texts for options that can be repeated
    options: dict[str, Any]
    script: str  # the script, module or executable
    script_args: list[str]  # its arguments, unchanged


class ConfigParser(argparse.ArgumentParser):
    """A parser that raises ConfigurationError, which is shown as one line."""

    def error(self, message: str) -> NoReturn:
        raise ConfigurationError(f"{message}. `{self.prog} --help` lists the options.")


def build_parser(options: Iterable[Option] | None = None) -> argparse.ArgumentParser:
    """Return the parser of ``accel launch``: of these options, or of all, in their groups."""
    parser = ConfigParser(
        prog="accel launch",
        usage="accel launch [options] script [script arguments]",
        epilog=EPILOG,
        allow_abbrev=False,
        description="Start a script on one or many processes and machines.",
        formatter_class=_HelpFormatter,
    )
    for opt in options or ():
        add_argument(parser, opt)
    for group in load_groups() if options is None else ():
        group.add_to_parser(parser)
    return parser


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Shows flags with underscores and short flags; the spellings with dashes would double the list."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        shown = [flag for flag in action.option_strings if not flag.startswith("--") or "-" not in flag[2:]]
        if action.nargs in (0, "?"):
            return ", ".join(shown or action.option_strings)
        return f"{', '.join(shown)} {self._format_args(action, str(action.metavar))}"


def parse(argv: Sequence[str]) -> CommandLine:
    """Parse a command line. ``--help`` prints the help and raises SystemExit(0)."""
    end = find_script(argv)
    # The script's own arguments are not parsed: they may look like options of the launcher, or contain `--`.
    words = [word for word in argv[:end] if word != "--"]
    options, given, asks_help = _options_by_flag(), {}, False
    for word in words:
        for flag in (word.partition("=")[0], word[:2]):  # a short flag may have its value attached
            asks_help |= flag in ("-h", "--help")
            if flag in options:
                given[options[flag].name] = options[flag]
    # Only --help needs the options that are not given.
    values = vars(build_parser(None if asks_help else given.values()).parse_args(words))
    if end >= len(argv):
        raise ConfigurationError("no script is given. Usage: accel launch [options] script [script arguments].")
    return CommandLine(unwrap_lists(values), argv[end], list(argv[end + 1 :]))


def parse_options(argv: Sequence[str], parser: argparse.ArgumentParser) -> dict[str, Any]:
    """Parse the options of a command that takes no script, by name."""
    known = sorted(parser._option_string_actions)
    for word in argv:
        flag = word.partition("=")[0]
        if flag.startswith("--") and flag not in known:
            raise _unknown_option(flag, known, parser.prog)
    return unwrap_lists(vars(parser.parse_args(list(argv))))


def _unknown_option(flag: str, known: Sequence[str], program: str) -> ConfigurationError:
    return ConfigurationError(f"{flag} is not an option.{suggest(flag, known)} `{program} --help` lists the options.")


def unwrap_lists(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of options that a parser has found."""
    # A repeatable option that is given once may hold the complete list, as JSON.
    return {name: value[0] if isinstance(value, list) and len(value) == 1 else value for name, value in given.items()}


@functools.cache
def _options_by_flag() -> dict[str, Option]:
    """Return every option of a launch, by each of its flags."""
    options: dict[str, Option] = {}
    for opt in all_options().values():
        options |= dict.fromkeys((*opt.flags, *opt.undo_flags), opt)
    return options


def find_script(argv: Sequence[str], also: Sequence[str] = ()) -> int:
    """Return the index of the first word that is neither an option nor the value of one.

    Args:
        argv: words of a command line.
        also: options with a value that are not those of a launch.
    """
    options, index = _options_by_flag(), 0
    while index < len(argv):
        word = argv[index]
        if word == "--":
            return index + 1
        if not word.startswith("-") or word == "-":
            return index
        flag = word.partition("=")[0]
        if flag in also:
            index += 1 if "=" in word else 2
            continue
        index += 1 + _takes_next(word, options, argv[index + 1] if index + 1 < len(argv) else None)
    return index


def _takes_next(word: str, options: dict[str, Option], following: str | None) -> bool:
    """Return True if the word after an option is its value."""
    flag, sign, _ = word.partition("=")
    if flag in ("-h", "--help"):
        return False
    if flag not in options:
        # A short option may have its value attached: -t3.
        if not word.startswith("--") and word[:2] in options and not options[word[:2]].is_flag:
            return False
        raise _unknown_option(flag, sorted(options), "accel launch")
    if sign or options[flag].is_flag or flag in options[flag].undo_flags:
        return False
    if following is None:
        raise ConfigurationError(f"{flag} needs a value: {options[flag].allowed()}.")
    return True

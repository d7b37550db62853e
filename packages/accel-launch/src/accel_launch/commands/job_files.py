"""What commands that write a file for a scheduler share: their options, variables, and the file. Torch-free."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from accel_state.errors import ConfigurationError
from accel_state.options import Resolution
from accel_state.options.resources import MachineRange
from accel_state.secrets import HIDDEN, hide

from ..parser import CommandLine, ConfigParser, parse

VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
"""A name of an environment variable."""
LABEL = re.compile(r"[a-z]([-a-z0-9]{0,51}[a-z0-9])?")
"""A name of a job that every cluster accepts."""


def parse_job(
    argv: Sequence[str], parser: argparse.ArgumentParser, chosen: Collection[str], reason: str
) -> tuple[argparse.Namespace, list[str], CommandLine]:
    """Return the options of a command, the words after them, and these as a command line of ``accel launch``.

    Args:
        argv: the words after the name of the command.
        parser: of its options.
        chosen: options of ``accel launch`` that the scheduler decides.
        reason: what is said of them, after their name.

    Raises:
        ConfigurationError: an error in the command line, or one of those options is in it.
    """
    own, end = parser._option_string_actions, 0
    while end < len(argv) and (flag := argv[end].partition("=")[0]) in own:
        end += 1 if "=" in argv[end] or own[flag].nargs == 0 else 2
    arguments = parser.parse_args(argv[:end])
    words = list(argv[end + 1 :] if argv[end : end + 1] == ["--"] else argv[end:])
    command_line = parse(words)
    for name in chosen:
        if name in command_line.options:
            raise ConfigurationError(f"--{name} {reason}")
    return arguments, words, command_line


def refuse_cpu(settings: Resolution, devices: str | None) -> None:
    """Refuse accelerators for a run on the CPU, which would leave them idle.

    Args:
        settings: of the launch.
        devices: the option that asks for accelerators, as it was typed; None if it was not.

    Raises:
        ConfigurationError: both were chosen.
    """
    if devices and settings["cpu"]:
        raise ConfigurationError(f"{devices} and {settings.where('cpu')} contradict each other. Leave out one of them.")


def refuse_other_places(settings: Resolution, what: str, devices: str | None) -> None:
    """Refuse settings with which the processes would not be those of a job with a fixed number of machines.

    Args:
        settings: of the launch; a file of settings may ask for anything.
        what: how the scheduler calls the machines.
        devices: see :func:`refuse_cpu`.

    Raises:
        ConfigurationError: ``compute_environment`` is another one, ``num_machines`` is a range, or a run on the CPU has
            accelerators.
    """
    if settings["compute_environment"] != "LOCAL_MACHINE":
        raise ConfigurationError(
            f"{settings.where('compute_environment')}: the processes would start elsewhere than on the {what} of the "
            "job. Leave it out."
        )
    if isinstance(settings["num_machines"], MachineRange):
        raise ConfigurationError(
            f"{settings.where('num_machines')}: a job has a fixed number of {what}, which --nodes gives, and ends when "
            "all have ended. Leave the range out. Evicted or preempted nodes are restarted, and the run continues "
            "from its newest state."
        )
    refuse_cpu(settings, devices)


def job_parser(command: str, usage: str, kind: str, description: str, epilog: str) -> tuple[ConfigParser, Any]:
    """Return the parser of a command, with ``--output``, and the group of its own options.

    Args:
        command: its name.
        usage: its first own options.
        kind: what it writes: "job" or "task".
        description: for ``--help``.
        epilog: likewise.
    """
    parser = ConfigParser(
        prog=command,
        usage=f"{command} {usage}[{kind} options] [options of accel launch] script [script arguments]",
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    group = parser.add_argument_group(f"{kind} options")
    text = "the file to write, which must not exist (default: print it)"
    group.add_argument("--output", type=Path, metavar="FILE", help=text)
    return parser, group


def deliver(text: str, output: Path | None, mode: int, next_step: str) -> None:
    """Print a file, or write it and say on the standard error what to run next, with the file's path at the end."""
    if output is None:
        print(text, end="")
        return
    try:
        # Never in place of a file, or through a link: scripts are edited by hand.
        descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    except FileExistsError:
        raise ConfigurationError(f"--output {output} exists. Choose another name, or delete the file.") from None
    except OSError as error:
        raise ConfigurationError(f"--output {output} cannot be written: {error.strerror}.") from None
    with open(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
    print(f"wrote {output}. {next_step} {shlex.quote(str(output))}", file=sys.stderr)


def count_of(text: str) -> int:
    """Return a positive integer, for argparse."""
    if not text.isascii() or not text.isdigit() or not 0 < int(text) < 2**31:
        raise argparse.ArgumentTypeError(f"{text!r} must be a positive integer")
    return int(text)


def one_line(text: str) -> str:
    """Text without line breaks, for argparse."""
    if not text.strip() or not text.isprintable():
        raise argparse.ArgumentTypeError(f"{text!r} must be one line of text")
    return text


def name_of(script: str) -> str:
    """Return a name for the job of a script or module."""
    name = re.sub(r"[^a-z0-9]+", "-", Path(script).stem.lower()).strip("-")
    return name if LABEL.fullmatch(name) else "train"


def plain_variable(text: str, file: str, advice: str) -> tuple[str, str]:
    """Name and value of ``--env NAME=VALUE``, which must not be a secret.

    Args:
        text: the value of the option.
        file: what the value would be readable in.
        advice: how to pass a secret.

    Raises:
        ConfigurationError: it has another form, or looks like a secret.
    """
    name, sign, value = text.partition("=")
    if not sign or not VARIABLE.fullmatch(name):
        raise ConfigurationError(f"--env {name}: give NAME=VALUE.")
    if hide(name, value) != value:
        raise ConfigurationError(f"--env {name}={HIDDEN}: the value would be readable in the {file}. {advice}.")
    return name, value

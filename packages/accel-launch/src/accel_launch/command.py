"""A subcommand, and the registry of all; other packages add theirs through the entry point group ``accel.commands``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from accel_state.registry import Registry


@dataclass(frozen=True)
class Command:
    """A subcommand of ``accel``. ``accel --help`` imports its module, so the module must import nothing heavy.

    Attributes:
        summary: one line for ``accel --help``.
        run: takes the arguments after the command's name, and returns the exit code. A ConfigurationError that it
            raises is shown as one line.
    """

    summary: str
    run: Callable[[list[str]], int]


COMMANDS: Registry[Command] = Registry(
    "command",
    {
        "launch": "accel_launch.commands.launch:COMMAND",
        "config": "accel_launch.commands.config:COMMAND",
        "env": "accel_launch.commands.env:COMMAND",
        "doctor": "accel_launch.commands.doctor:COMMAND",
        "tpu-config": "accel_launch.commands.tpu_config:COMMAND",
    },
    "accel.commands",
)

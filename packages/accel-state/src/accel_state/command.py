"""The interface of a subcommand of ``accel``. Torch-free."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Command:
    """A subcommand, in the entry point group ``accel.commands``.

    ``accel --help`` imports its module, so the module must import nothing heavy.

    Attributes:
        summary: one line for ``accel --help``.
        run: takes the arguments after the command's name, and returns the exit code. A ConfigurationError that it
            raises is shown as one line.
    """

    summary: str
    run: Callable[[list[str]], int]

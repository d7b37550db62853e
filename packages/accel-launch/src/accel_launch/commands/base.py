"""What a subcommand is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Command:
    """A subcommand of ``accel``. Its module must import nothing heavy: ``accel --help`` loads it for the summary.

    Attributes:
        summary: one line for ``accel --help``.
        run: takes the arguments after the command's name, returns the exit code. A ConfigurationError that it raises is
            shown as one line.
    """

    summary: str
    run: Callable[[list[str]], int]

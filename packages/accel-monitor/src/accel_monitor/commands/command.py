"""What subcommands share. Torch-free."""

from __future__ import annotations

import argparse
from pathlib import Path

from accel_state.errors import ConfigurationError

from ..records import Run, read_runs


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments that name a run."""
    parser.add_argument(
        "directory", type=Path, nargs="?", default=Path("."), metavar="DIR", help="project directory (default: .)"
    )
    parser.add_argument(
        "--run", type=int, metavar="N", help="the Nth run in the directory, from 1 (default: the latest)"
    )


def chosen_run(directory: Path, number: int | None) -> Run:
    """The run that a command shows, with a note if there are others.

    Raises:
        ConfigurationError: there is none, or not this one.
    """
    runs = read_runs(directory)
    if number is not None and not 1 <= number <= len(runs):
        raise ConfigurationError(
            f"--run {number}: {directory} holds {len(runs)} run(s). Give a number from 1 to {len(runs)}."
        )
    run = runs[-1 if number is None else number - 1]
    if len(runs) > 1:
        shown = len(runs) if number is None else number
        run.notes.insert(0, f"{directory} holds {len(runs)} runs, and this is run {shown}; --run N shows another.")
    return run

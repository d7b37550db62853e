"""``accel track``: a plain look at runs of the JSON-lines tracker. Torch-free."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from accel_state.errors import ConfigurationError

PROGRAM = "accel track"


@dataclass(frozen=True)
class Command:
    """A subcommand of ``accel``, as ``accel_launch.commands.base.Command`` describes it."""

    summary: str
    run: Callable[[list[str]], int]


def run(argv: Sequence[str]) -> int:
    """Run ``accel track``.

    Args:
        argv: the arguments after it.

    Returns:
        The exit code.

    Raises:
        ConfigurationError: there is no run to show, or nothing of it that was asked for.
        MissingDependencyError: a PNG was asked for, and matplotlib is not installed.
    """
    arguments = _parser().parse_args(list(argv) or ["--help"])
    from ..viewer.show import show

    show(arguments)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        PROGRAM, description="A plain look at runs that were logged with log_with='jsonl'."
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    show = commands.add_parser("show", help="print the last values and draw the curves of one run or several")
    show.add_argument(
        "folder", type=Path, metavar="DIR", help="a run, or a folder that contains runs (the logging_dir)"
    )
    show.add_argument(
        "--run",
        action="append",
        default=[],
        metavar="TEXT",
        help="only runs whose project/run id contains this; repeatable",
    )
    show.add_argument(
        "--metric", action="append", default=[], metavar="PATTERN", help="only metrics like this ('*loss*'); repeatable"
    )
    show.add_argument(
        "--smooth", type=_fraction, default=0.0, metavar="W", help="weight of the past in a moving average, 0 to 1"
    )
    show.add_argument("--png", type=Path, metavar="FILE", help="write the curves as an image (needs matplotlib)")
    show.add_argument(
        "--html", type=Path, metavar="FILE", help="write one page that needs no network: values, configs and curves"
    )
    show.add_argument("--csv", type=Path, metavar="FILE", help="write the rows of one run as a table")
    size = shutil.get_terminal_size((100, 24))
    show.add_argument("--width", type=int, default=size.columns, metavar="N", help="columns of the terminal")
    show.add_argument("--height", type=int, default=10, metavar="N", help="lines of a curve (default 10)")
    return parser


def _fraction(text: str) -> float:
    value = float(text)
    if not 0.0 <= value < 1.0:
        raise argparse.ArgumentTypeError(f"{text} is not at least 0 and below 1")
    return value


def main() -> int:
    """Run as ``python -m accel_track``; what is wrong becomes one line and the exit code 2."""
    from accel_state.errors import MissingDependencyError

    try:
        return run(sys.argv[1:])
    except (ConfigurationError, MissingDependencyError) as error:
        print(f"{PROGRAM}: error: {error}", file=sys.stderr)
        return 2


COMMAND = Command("show runs that were logged with the JSON-lines tracker", lambda argv: run(argv))

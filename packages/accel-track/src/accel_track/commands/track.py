"""``accel track``: show runs of the jsonl tracker. Torch-free."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accel_state.command import Command
from accel_state.errors import ConfigurationError, MissingDependencyError

PROGRAM = "accel track"


def run(argv: Sequence[str]) -> int:
    """Run ``accel track``.

    Args:
        argv: the command line after ``accel track``.

    Returns:
        The exit code.

    Raises:
        ConfigurationError: there is no matching run or metric.
        MissingDependencyError: ``--png`` without matplotlib.
    """
    arguments = _parser().parse_args(list(argv) or ["--help"])
    from ..viewer.show import show

    show(arguments)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(PROGRAM, description="Show runs that were logged with log_with='jsonl'.")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    show = commands.add_parser("show", help="print the last values and plot the curves of one or several runs")
    text = "directory of a run, or one that contains runs; several are shown together"
    show.add_argument("folders", type=Path, nargs="+", metavar="DIR", help=text)
    columns = shutil.get_terminal_size((100, 24)).columns
    repeatable = {"action": "append", "default": []}
    options: dict[str, tuple[str, str, dict[str, Any]]] = {
        "--run": ("TEXT", "only runs whose project/run_id contains TEXT; repeatable", repeatable),
        "--metric": (
            "PATTERN",
            "only values that match PATTERN, such as '*loss*', in plots and tables; repeatable",
            repeatable,
        ),
        "--smooth": ("W", "weight of past values in a moving average, in [0, 1)", {"type": _fraction, "default": 0.0}),
        "--png": ("FILE", "write the curves as an image (needs matplotlib)", {"type": Path}),
        "--html": ("FILE", "write values, configs and curves as a self-contained page", {"type": Path}),
        "--csv": ("FILE", "write the rows of one run as comma-separated values", {"type": Path}),
        "--width": ("N", "width of a plot in characters (default: the terminal's)", {"type": int, "default": columns}),
        "--height": ("N", "height of a plot in lines (default: 10)", {"type": int, "default": 10}),
    }
    for flag, (metavar, text, settings) in options.items():
        show.add_argument(flag, metavar=metavar, help=text, **settings)
    return parser


def _fraction(text: str) -> float:
    value = float(text)
    if not 0.0 <= value < 1.0:
        raise argparse.ArgumentTypeError(f"{text} must be in [0, 1)")
    return value


def main() -> int:
    """Run as ``python -m accel_track``; prints an expected error as one line and returns exit code 2."""
    try:
        return run(sys.argv[1:])
    except (ConfigurationError, MissingDependencyError) as error:
        print(f"{PROGRAM}: error: {error}", file=sys.stderr)
        return 2


COMMAND = Command("show runs of the jsonl tracker", lambda argv: run(argv))

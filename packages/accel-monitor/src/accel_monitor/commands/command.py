"""What subcommands share. Torch-free."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_run_arguments(parser: argparse.ArgumentParser, metavar: str = "DIR", text: str = "project directory") -> None:
    """Add the arguments that name a run."""
    parser.add_argument(
        "directory", type=Path, nargs="?", default=Path("."), metavar=metavar, help=f"{text} (default: .)"
    )
    parser.add_argument(
        "--run", type=int, metavar="N", help="the Nth run in the directory, from 1 (default: the latest)"
    )

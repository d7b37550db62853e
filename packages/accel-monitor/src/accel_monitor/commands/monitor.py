"""``accel monitor``: what the ranks of a run do now, read from its files or from its port. Torch-free."""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from accel_state import env
from accel_state.command import Command
from accel_state.errors import ConfigurationError

from ..page import render
from ..records import chosen_run
from .command import add_run_arguments
from .show_batch import run as show_batch


def run(argv: Sequence[str]) -> int:
    """Run ``accel monitor``. In a terminal the page is drawn again until Ctrl-C; elsewhere it is printed once.

    Returns:
        The exit code.

    Raises:
        ConfigurationError: there is no such run, or nothing answers at a port.
    """
    if argv and argv[0] == "show-batch":
        return show_batch(argv[1:])
    parser = argparse.ArgumentParser(
        "accel monitor",
        description="Show what the ranks of a monitored run do. `accel monitor show-batch` reads the samples of a bad "
        "step again.",
    )
    add_run_arguments(parser, "DIR|HOST:PORT", "project directory, or where a run with --monitor_port is served")
    parser.add_argument(
        "--token_file", type=Path, metavar="FILE", help="with HOST:PORT: a copy of monitor/token in the run's directory"
    )
    parser.add_argument("--once", action="store_true", help="print the page once, as without a terminal")
    arguments = parser.parse_args(list(argv))
    live = sys.stdout.isatty() and not arguments.once
    while True:
        size = shutil.get_terminal_size((100, 40))
        lines = _page(arguments, size.columns, size.lines)
        if not live:
            print("\n".join(lines))
            return 0
        cut = [line[: size.columns] for line in lines[: size.lines - 1]]
        if has_colours():
            cut = [coloured(line) for line in cut]
        print("\x1b[H" + "".join(f"{line}\x1b[K\n" for line in cut) + "\x1b[J", end="", flush=True)
        time.sleep(1.0)


# Of the 256 colours of terminals: those of `accel goodput --html`, with black letters.
_COLOURS = {"D": 172, "F": 35, "B": 29, "w": 185, "O": 71, ".": 248, "E": 37, "S": 68, "L": 117, "C": 62, "-": 104}
_BAR = re.compile(r"(?<= )[DFBwO.ESLC-]{4,}$")
_RUN = re.compile(r"(.)\1*")


def has_colours() -> bool:
    """Return True if the terminal shows colours, and its user wants them (https://no-color.org)."""
    return not env.read_str("NO_COLOR") and env.read_str("TERM", "dumb") != "dumb"


def coloured(line: str) -> str:
    """Return a line of the page with the colours of its bar. The letters stay: no fact depends on a colour alone."""
    if line.startswith(("slow:", "bad:")):
        return f"\x1b[1m{line}\x1b[0m"
    return _BAR.sub(
        lambda bar: _RUN.sub(lambda run: f"\x1b[30;48;5;{_COLOURS[run[1]]}m{run[0]}", bar[0]) + "\x1b[0m", line
    )


def _page(arguments: argparse.Namespace, columns: int, lines: int) -> list[str]:
    # Imported here: most pages are those of files, and this one imports a client and a server of HTTP.
    from ..client import remote_page, split_remote

    remote = None if arguments.directory.exists() else split_remote(str(arguments.directory))
    if remote is None:
        return list(render(chosen_run(arguments.directory, arguments.run), columns, lines))
    if arguments.token_file is None:
        raise ConfigurationError(
            f"{arguments.directory} asks for the token of its run: give --token_file with a copy of monitor/token in "
            "the run's project directory."
        )
    return remote_page(*remote, arguments.token_file, columns, lines, arguments.run)


COMMAND = Command("show what the ranks of a monitored run do", lambda argv: run(argv))

"""``accel monitor``: what the ranks of a run do now. Torch-free."""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Sequence

from accel_state.command import Command

from ..page import render
from .command import add_run_arguments, chosen_run
from .show_batch import run as show_batch


def run(argv: Sequence[str]) -> int:
    """Run ``accel monitor``. In a terminal the page is drawn again until Ctrl-C; elsewhere it is printed once.

    Returns:
        The exit code.

    Raises:
        ConfigurationError: there is no such run.
    """
    if argv and argv[0] == "show-batch":
        return show_batch(argv[1:])
    parser = argparse.ArgumentParser(
        "accel monitor",
        description="Show what the ranks of a monitored run do. `accel monitor show-batch` reads the samples of a bad "
        "step again.",
    )
    add_run_arguments(parser)
    parser.add_argument("--once", action="store_true", help="print the page once, as without a terminal")
    arguments = parser.parse_args(list(argv))
    live = sys.stdout.isatty() and not arguments.once
    while True:
        size = shutil.get_terminal_size((100, 40))
        chosen = chosen_run(arguments.directory, arguments.run)
        lines = list(render(chosen, size.columns, size.lines))
        if not live:
            print("\n".join(lines))
            return 0
        cut = [line[: size.columns] for line in lines[: size.lines - 1]]
        print("\x1b[H" + "".join(f"{line}\x1b[K\n" for line in cut) + "\x1b[J", end="", flush=True)
        time.sleep(1.0)


COMMAND = Command("show what the ranks of a monitored run do", lambda argv: run(argv))

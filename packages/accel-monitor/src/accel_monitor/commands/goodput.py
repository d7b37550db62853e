"""``accel goodput``: what the time of a run was spent on. Torch-free."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from accel_state.command import Command
from accel_state.errors import ConfigurationError
from accel_state.paths import open_for_writing

from ..html import page
from ..ledger import Ledger, make_ledger
from ..records import chosen_run
from ..report import report
from .command import add_run_arguments


def run(argv: Sequence[str]) -> int:
    """Run ``accel goodput``.

    Returns:
        The exit code.

    Raises:
        ConfigurationError: there is no such run, or the page cannot be written.
    """
    parser = argparse.ArgumentParser(
        "accel goodput", description="Print what the time of a monitored run was spent on."
    )
    add_run_arguments(parser)
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a self-contained page with the timeline")
    arguments = parser.parse_args(list(argv))
    ledger = make_ledger(chosen_run(arguments.directory, arguments.run))
    print("\n".join(report(ledger)))
    if arguments.html is not None:
        _write_page(arguments.html, ledger)
        print(f"page: {arguments.html}")
    return 0


def _write_page(file: Path, ledger: Ledger) -> None:
    if file.is_dir() or not file.parent.is_dir():
        raise ConfigurationError(f"--html {file} is not a file in an existing directory. Give another name.")
    content = page(ledger).encode()
    with os.fdopen(open_for_writing(file), "wb") as stream:
        stream.write(content)


COMMAND = Command("print what the time of a monitored run was spent on", lambda argv: run(argv))

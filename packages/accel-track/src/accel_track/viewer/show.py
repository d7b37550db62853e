"""``accel track show``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from accel_state.errors import ConfigurationError

from ..jsonl_reader import Run, find_runs
from .curves import Chart, charts, one_line
from .html import write_html
from .png import write_png
from .terminal import draw

_MOST_CHARTS = 12


def show(arguments: argparse.Namespace) -> None:
    """Do what the command line asks for: files where they were named, else text on the terminal.

    Raises:
        ConfigurationError: there is no run, or no metric, that was asked for.
        MissingDependencyError: an image was asked for, and matplotlib is not installed.
    """
    if arguments.width < 20 or arguments.height < 2:
        raise ConfigurationError(
            f"--width {arguments.width} --height {arguments.height} is too small. Give at least 20 and 2."
        )
    runs = find_runs(arguments.folder, arguments.run)
    if arguments.csv is not None:
        _write_csv(runs, arguments)
        if arguments.png is None and arguments.html is None:
            return
    # An image needs a curve; the last values of texts are worth showing without any.
    must_draw = arguments.png is not None or arguments.metric or any(run.series() for run in runs)
    drawn = charts(runs, arguments.metric, arguments.smooth) if must_draw else []
    if arguments.png is not None:
        write_png(drawn, arguments.png)
        print(f"wrote {arguments.png}")
    if arguments.html is not None:
        write_html(runs, drawn, arguments.html)
        print(f"wrote {arguments.html}")
    if arguments.png is None and arguments.html is None:
        _print(runs, drawn, arguments)


def _write_csv(runs: Sequence[Run], arguments: argparse.Namespace) -> None:
    if len(runs) > 1:
        names = ", ".join(run.name for run in runs)
        raise ConfigurationError(f"--csv takes one run, and there are {len(runs)}: {names}. Choose one with --run.")
    runs[0].write_csv(arguments.csv)
    print(f"wrote {arguments.csv}")


def _print(runs: Sequence[Run], drawn: Sequence[Chart], arguments: argparse.Namespace) -> None:
    for run in runs:
        print(_heading(run))
        print(_table(run))
    for chart in drawn[:_MOST_CHARTS]:
        print()
        print(draw(chart, arguments.width, arguments.height, braille=_shows_braille()))
    if len(drawn) > _MOST_CHARTS:
        print(f"\n{len(drawn) - _MOST_CHARTS} more: choose with --metric, or write them all with --html.")


def _heading(run: Run) -> str:
    facts = [one_line(run.facts[name]) for name in ("status", "started", "host") if name in run.facts]
    damaged = [f"{run.damaged} unreadable line{'s' if run.damaged > 1 else ''}"] if run.damaged else []
    return f"{one_line(run.name)}  ({', '.join([*facts, f'{len(run.rows)} rows', *damaged])})"


def _table(run: Run) -> str:
    last = run.last()
    if not last:
        return "  nothing was logged yet"
    named = [(one_line(name), step, value) for name, (step, value) in last.items()]
    wide = max(len(name) for name, _, _ in named)
    lines = [
        f"  {name:<{wide}}  {one_line(value):>12}" + ("" if step is None else f"  at step {one_line(step)}")
        for name, step, value in named
    ]
    return "\n".join(lines)


def _shows_braille() -> bool:
    try:
        "┤⣿".encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True

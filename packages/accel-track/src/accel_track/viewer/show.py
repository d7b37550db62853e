"""``accel track show``."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from accel_state.errors import ConfigurationError, require

from ..jsonl_reader import Run, find_runs, matches
from .html import write_html
from .labels import run_labels
from .terminal import Chart, charts, draw, one_line, smooth

_INCHES = (4.6, 2.9)
# The width of a range must be a float too.
_LARGEST = 1e300


def write_png(charts: Sequence[Chart], path: Path) -> None:
    """Write charts, two in a row; the suffix of ``path`` determines the format (.png, .svg, .pdf)."""
    # Not pyplot, which would select a GUI back end and keep every figure.
    figure_class = require("matplotlib.figure", purpose="an image of the curves", install="accel-track[plot]").Figure
    columns = min(len(charts), 2)
    rows = -(-len(charts) // columns)
    figure = figure_class(figsize=(_INCHES[0] * columns, _INCHES[1] * rows), layout="constrained")
    for index, chart in enumerate(charts):
        axes = figure.add_subplot(rows, columns, index + 1)
        for name, points in chart.curves.items():
            steps, values = [step for step, _ in points], [_drawable(value) for _, value in points]
            marker = "o" if sum(map(math.isfinite, values)) == 1 else None  # a line has no point to end at
            axes.plot(steps, values, label=one_line(name), linewidth=1.4, marker=marker)
        axes.set_title(one_line(chart.metric), fontsize=10)
        axes.set_xlabel("step", fontsize=8)
        axes.tick_params(labelsize=8)
        axes.grid(alpha=0.3)
        if len(chart.curves) > 1:
            axes.legend(fontsize=7)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)


def _drawable(value: float) -> float:
    return max(-_LARGEST, min(value, _LARGEST)) if math.isfinite(value) else math.nan


_MOST_CHARTS = 12


def show(arguments: argparse.Namespace) -> None:
    """Write the requested files, or print to the terminal if none is requested."""
    if arguments.width < 20 or arguments.height < 2:
        raise ConfigurationError(
            f"--width {arguments.width} --height {arguments.height} is too small. Use at least --width 20 --height 2."
        )
    runs = find_runs(arguments.folders, arguments.run)
    if arguments.csv is not None:
        _write_csv(runs, arguments)
        if arguments.png is None and arguments.html is None:
            return
    # Texts can be printed, but not plotted.
    patterns = arguments.metric
    has_numbers = any(matches(name, patterns) for run in runs for name in run.series())
    needs_charts = (
        arguments.png is not None or has_numbers or (patterns and not any(run.last(patterns) for run in runs))
    )
    drawn = charts(runs, patterns) if needs_charts else []
    labels = run_labels(runs)
    if arguments.png is not None:
        write_png(_labelled(drawn, labels, arguments.smooth), arguments.png)
        print(f"wrote {arguments.png}")
    if arguments.html is not None:
        write_html(runs, drawn, arguments.html, patterns, arguments.smooth)
        print(f"wrote {arguments.html}")
    if arguments.png is None and arguments.html is None:
        _print(runs, labels, _labelled(drawn, labels, arguments.smooth), arguments)


def _write_csv(runs: Sequence[Run], arguments: argparse.Namespace) -> None:
    if len(runs) > 1:
        names = ", ".join(run.name for run in runs)
        raise ConfigurationError(f"--csv takes one run, and there are {len(runs)}: {names}. Select one with --run.")
    runs[0].write_csv(arguments.csv, arguments.metric)
    print(f"wrote {arguments.csv}")


def _labelled(drawn: Sequence[Chart], labels: Mapping[str, str], weight: float) -> list[Chart]:
    """Return charts with labels in place of the names of runs, smoothed."""
    return [
        Chart(chart.metric, {labels[name]: smooth(points, weight) for name, points in chart.curves.items()})
        for chart in drawn
    ]


def _print(
    runs: Sequence[Run], labels: Mapping[str, str], drawn: Sequence[Chart], arguments: argparse.Namespace
) -> None:
    for run in runs:
        _print_last_values(run, labels[run.name], arguments.metric)
    for chart in drawn[:_MOST_CHARTS]:
        print()
        print(draw(chart, arguments.width, arguments.height, braille=_shows_braille()))
    if len(drawn) > _MOST_CHARTS:
        print(f"\n{len(drawn) - _MOST_CHARTS} more plots. Select some with --metric, or write all with --html.")


def _print_last_values(run: Run, label: str, patterns: Sequence[str]) -> None:
    facts = [] if run.name.endswith(label) else [label]
    facts += [one_line(run.facts[name]) for name in ("status", "started", "host") if name in run.facts]
    damaged = [f"{run.damaged} unreadable line{'s' if run.damaged > 1 else ''}"] if run.damaged else []
    print(f"{one_line(run.name)}  ({', '.join([*facts, f'{len(run.rows)} rows', *damaged])})")
    values = [(one_line(name), step, value) for name, (step, value) in run.last(patterns).items()]
    width = max((len(name) for name, _, _ in values), default=0)
    for name, step, value in values:
        at_step = "" if step is None else f"  at step {one_line(step)}"
        print(f"  {name:<{width}}  {one_line(value):>12}{at_step}")
    if not values:
        print("  nothing that matches was logged" if patterns and run.rows else "  nothing was logged yet")


def _shows_braille() -> bool:
    try:
        "┤⣿".encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True

"""Curves as an image, drawn by matplotlib."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from accel_state.errors import require

from .curves import Chart, one_line

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
            axes.plot(steps, values, label=one_line(name), linewidth=1.4)
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

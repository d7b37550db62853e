"""Selection and smoothing of the metrics to plot. Torch-free."""

from __future__ import annotations

import fnmatch
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from accel_state.errors import ConfigurationError

from ..jsonl_reader import Run

Points = list[tuple[float, float]]


@dataclass(frozen=True)
class Chart:
    """The curves of one metric."""

    metric: str
    curves: dict[str, Points]  # points (step, value) by run name

    def limits(self) -> tuple[float, float, float, float]:
        """First and last step, lowest and highest value of all finite points; empty ranges are widened."""
        points = [point for curve in self.curves.values() for point in curve if math.isfinite(point[1])]
        steps, values = [step for step, _ in points] or [0.0], [value for _, value in points] or [0.0]
        low, high, first, last = min(values), max(values), min(steps), max(steps)
        if high == low:
            margin = abs(high) * 0.05 or 1.0
            low, high = max(low - margin, -sys.float_info.max), min(high + margin, sys.float_info.max)
        if last == first:
            last += max(1.0, abs(first) * 1e-9)  # steps may be time stamps, too large for adding 1
        return first, last, low, high


def fraction(value: float, low: float, high: float) -> float:
    """Position of a value in a range, from 0 to 1."""
    # Halved, because the width of a range of floats may overflow.
    return (value / 2 - low / 2) / (high / 2 - low / 2)


def charts(runs: Sequence[Run], patterns: Sequence[str] = (), weight: float = 0.0) -> list[Chart]:
    """A chart for every metric that matches a shell pattern, smoothed with ``weight``, in the order of first values."""
    series = {run.name: run.series() for run in runs}
    names = list(dict.fromkeys(name for metrics in series.values() for name in metrics))
    selected = [name for name in names if not patterns or any(fnmatch.fnmatch(name, pattern) for pattern in patterns)]
    if not selected:
        known = f"Numeric metrics: {', '.join(names)}." if names else "No numeric metric was logged yet."
        matching = f" that matches {' '.join(patterns)}" if patterns else ""
        raise ConfigurationError(f"there is no metric to plot{matching}. {known}")
    return [
        Chart(name, {run: smooth(metrics[name], weight) for run, metrics in series.items() if name in metrics})
        for name in selected
    ]


def smooth(points: Points, weight: float) -> Points:
    """Exponential moving average with the bias correction of Adam (https://arxiv.org/abs/1412.6980, section 3)."""
    if not weight:
        return points
    result, average, total = [], 0.0, 0.0
    for step, value in points:
        if math.isfinite(value):
            average = weight * average + (1.0 - weight) * value
            total = weight * total + (1.0 - weight)
        result.append((step, average / total if math.isfinite(value) else value))
    return result


def text_of(number: float) -> str:
    """A number with four significant digits."""
    return f"{number:.4g}"


def one_line(value: object, longest: int = 200) -> str:
    """Any value as one line of text, with control characters escaped, truncated to ``longest`` characters."""
    text = text_of(value) if isinstance(value, float) else str(value)
    line = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text[: longest + 1])
    return line if len(text) <= longest else f"{line[:longest]}... ({len(text)} characters)"

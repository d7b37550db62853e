"""What there is to draw: the metrics that were asked for, of every run, smoothed. Torch-free."""

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
    """One metric.

    Attributes:
        metric: its name.
        curves: run name to points (step, value).
    """

    metric: str
    curves: dict[str, Points]

    def limits(self) -> tuple[float, float, float, float]:
        """First and last step, lowest and highest value of all finite points; a range of one value is widened."""
        points = [point for curve in self.curves.values() for point in curve if math.isfinite(point[1])]
        steps, values = [step for step, _ in points] or [0.0], [value for _, value in points] or [0.0]
        low, high, first, last = min(values), max(values), min(steps), max(steps)
        if high == low:
            margin = abs(high) * 0.05 or 1.0
            low, high = max(low - margin, -sys.float_info.max), min(high + margin, sys.float_info.max)
        # One step beyond, or as far as makes a difference to steps that are times.
        return first, last if last > first else first + max(1.0, abs(first) * 1e-9), low, high


def fraction(value: float, low: float, high: float) -> float:
    """How far a value is from the lower end of a range, from 0 to 1."""
    # Halves, since a range of floats may be wider than the largest of them.
    return (value / 2 - low / 2) / (high / 2 - low / 2)


def charts(runs: Sequence[Run], patterns: Sequence[str] = (), weight: float = 0.0) -> list[Chart]:
    """A chart for every metric of the runs, in the order in which they were logged first.

    Args:
        runs: the runs.
        patterns: names or shell patterns of the metrics to keep.
        weight: of the past, in an exponential moving average.

    Raises:
        ConfigurationError: no metric is like this.
    """
    series = {run.name: run.series() for run in runs}
    names = list(dict.fromkeys(name for metrics in series.values() for name in metrics))
    chosen = [name for name in names if not patterns or any(fnmatch.fnmatch(name, pattern) for pattern in patterns)]
    if not chosen and (patterns or not names):
        known = f"Metrics with numbers: {', '.join(names)}." if names else "Nothing with numbers was logged yet."
        raise ConfigurationError(
            f"there is nothing to draw{f' like {chr(32).join(patterns)}' if patterns else ''}. {known}"
        )
    return [
        Chart(name, {run: smooth(metrics[name], weight) for run, metrics in series.items() if name in metrics})
        for name in chosen
    ]


def smooth(points: Points, weight: float) -> Points:
    """An exponential moving average that starts without bias (the correction of Adam, https://arxiv.org/abs/1412.6980,
    section 3).

    Args:
        points: (step, value).
        weight: of the past; 0 changes nothing.
    """
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
    """A number, short."""
    return f"{number:.4g}"


def one_line(value: object, longest: int = 200) -> str:
    """Any value as a line of text that leaves the terminal alone: control characters are spelt out, and long texts cut."""
    text = text_of(value) if isinstance(value, float) else str(value)
    line = "".join(
        character if character.isprintable() else ascii(character)[1:-1] for character in text[: longest + 1]
    )
    return line if len(text) <= longest else f"{line[:longest]}... ({len(text)} characters)"

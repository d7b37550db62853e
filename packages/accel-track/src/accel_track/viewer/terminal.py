"""Plots made of characters."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from accel_state.errors import ConfigurationError

from ..jsonl_reader import Run, matches

Points = list[tuple[float, float]]


@dataclass(frozen=True)
class Chart:
    """The curves of one metric."""

    metric: str
    curves: dict[str, Points]  # points (step, value) by run name

    @property
    def is_point(self) -> bool:
        """True if all finite values are at one step."""
        return len({step for curve in self.curves.values() for step, value in curve if math.isfinite(value)}) == 1

    def limits(self) -> tuple[float, float, float, float]:
        """First and last step, lowest and highest value of all finite points; empty ranges are widened."""
        points = [point for curve in self.curves.values() for point in curve if math.isfinite(point[1])]
        steps, values = [step for step, _ in points] or [0.0], [value for _, value in points] or [0.0]
        low, high, first, last = min(values), max(values), min(steps), max(steps)
        if high == low:
            margin = abs(high) * 0.05 or 1.0
            low, high = max(low - margin, -sys.float_info.max), min(high + margin, sys.float_info.max)
        if last == first:
            margin = max(1.0, abs(first) * 1e-9)  # steps may be time stamps, too large for adding 1
            first, last = first - margin, last + margin
        return first, last, low, high


def fraction(value: float, low: float, high: float) -> float:
    """Position of a value in a range, from 0 to 1."""
    # Halved, because the width of a range of floats may overflow.
    return (value / 2 - low / 2) / (high / 2 - low / 2)


def charts(runs: Sequence[Run], patterns: Sequence[str] = ()) -> list[Chart]:
    """Return a chart per metric that matches a shell pattern, by first values."""
    series = {run.name: run.series() for run in runs}
    names = list(dict.fromkeys(name for metrics in series.values() for name in metrics))
    selected = [name for name in names if matches(name, patterns)]
    if not selected:
        known = f"Numeric metrics: {', '.join(names)}." if names else "No numeric metric was logged yet."
        matching = f" that matches {' '.join(patterns)}" if patterns else ""
        raise ConfigurationError(f"no metric to plot{matching}. {known}")
    return [
        Chart(name, {run: metrics[name] for run, metrics in series.items() if name in metrics}) for name in selected
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
    """Return a number with four significant digits."""
    return f"{number:.4g}"


def one_line(value: object, longest: int = 200) -> str:
    """Any value as one line of text, with control characters escaped, truncated to ``longest`` characters."""
    text = text_of(value) if isinstance(value, float) else str(value)
    line = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text[: longest + 1])
    return line if len(text) <= longest else f"{line[:longest]}... ({len(text)} characters)"


_MARKS = "*o+x#@%&"
# The bits of a braille character (Unicode, from U+2800), by row and column of its dots.
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))


def draw(chart: Chart, width: int, height: int, braille: bool) -> str:
    """Return a chart as lines of text."""
    first, last, low, high = chart.limits()
    labels = [text_of(high), *[""] * (height - 2), text_of(low)]
    margin = max(map(len, labels)) + 1
    columns = max(width - margin - 2, 10)
    # A single dot of a braille character is easily overlooked.
    use_dots = braille and len(chart.curves) == 1 and not chart.is_point
    wide, tall = (columns * 2, height * 4) if use_dots else (columns, height)
    dots: dict[tuple[int, int], int] = {}
    for number, points in enumerate(chart.curves.values()):
        for x, y in _pixels(points, (first, last, low, high), wide, tall):
            dots[x, y] = number
    rows = _braille(dots, columns, height) if use_dots else _marks(dots, columns, height)
    border = "┤" if braille else "|"
    lines = [f"{label:>{margin}} {border}{row}" for label, row in zip(labels, rows, strict=True)]
    axis = f"{'':>{margin}}  {text_of(first)}{text_of(last):>{max(columns - len(text_of(first)), 1)}}"
    if chart.is_point:
        axis = f"{'':>{margin}}  {text_of((first + last) / 2):^{columns}}".rstrip()
    named = [f"  {_MARKS[index % len(_MARKS)]} {one_line(name)}" for index, name in enumerate(chart.curves)]
    legend = named if len(named) > 1 else []
    return "\n".join([one_line(chart.metric), *legend, *lines, axis])


def _pixels(
    points: list[tuple[float, float]], limits: tuple[float, float, float, float], wide: int, tall: int
) -> set[tuple[int, int]]:
    """Return the cells (x, y) that a curve passes through, counted from the upper left."""
    first, last, low, high = limits
    pixels: set[tuple[int, int]] = set()
    before: tuple[int, int] | None = None
    for step, value in points:
        if not math.isfinite(value):
            before = None
            continue
        x = round(fraction(step, first, last) * (wide - 1))
        y = round((1.0 - fraction(value, low, high)) * (tall - 1))
        pixels.update(_line(before or (x, y), (x, y)))
        before = (x, y)
    return pixels


def _line(start: tuple[int, int], end: tuple[int, int]) -> list[tuple[int, int]]:
    count = max(abs(end[0] - start[0]), abs(end[1] - start[1]), 1)
    return [
        (round(start[0] + (end[0] - start[0]) * index / count), round(start[1] + (end[1] - start[1]) * index / count))
        for index in range(count + 1)
    ]


def _marks(dots: dict[tuple[int, int], int], columns: int, height: int) -> list[str]:
    return [
        "".join(_MARKS[dots[x, y] % len(_MARKS)] if (x, y) in dots else " " for x in range(columns)).rstrip()
        for y in range(height)
    ]


def _braille(dots: dict[tuple[int, int], int], columns: int, height: int) -> list[str]:
    cells = [[0] * columns for _ in range(height)]
    for x, y in dots:
        cells[y // 4][x // 2] |= _DOTS[y % 4][x % 2]
    return ["".join(chr(0x2800 + bits) if bits else " " for bits in row).rstrip() for row in cells]

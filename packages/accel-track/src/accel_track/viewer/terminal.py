"""Plots made of characters."""

from __future__ import annotations

import math

from .curves import Chart, fraction, one_line, text_of

_MARKS = "*o+x#@%&"
# The bits of a braille character (Unicode, from U+2800), by row and column of its dots.
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))


def draw(chart: Chart, width: int, height: int, braille: bool) -> str:
    """A chart as lines of text."""
    first, last, low, high = chart.limits()
    labels = [text_of(high), *[""] * (height - 2), text_of(low)]
    margin = max(map(len, labels)) + 1
    columns = max(width - margin - 2, 10)
    use_dots = braille and len(chart.curves) == 1
    wide, tall = (columns * 2, height * 4) if use_dots else (columns, height)
    dots: dict[tuple[int, int], int] = {}
    for number, points in enumerate(chart.curves.values()):
        for x, y in _pixels(points, (first, last, low, high), wide, tall):
            dots[x, y] = number
    rows = _braille(dots, columns, height) if use_dots else _marks(dots, columns, height)
    border = "┤" if braille else "|"
    lines = [f"{label:>{margin}} {border}{row}" for label, row in zip(labels, rows, strict=True)]
    axis = f"{'':>{margin}}  {text_of(first)}{text_of(last):>{max(columns - len(text_of(first)), 1)}}"
    named = [f"  {_MARKS[index % len(_MARKS)]} {one_line(name)}" for index, name in enumerate(chart.curves)]
    legend = named if len(named) > 1 else []
    return "\n".join([one_line(chart.metric), *legend, *lines, axis])


def _pixels(
    points: list[tuple[float, float]], limits: tuple[float, float, float, float], wide: int, tall: int
) -> set[tuple[int, int]]:
    """The cells (x, y) that a curve passes through, counted from the upper left."""
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

"""A page of charts and tables: one HTML file that needs no network. Torch-free.

The charts have a grid and a legend with the values under the pointer, which all charts of a page share; dragging
zooms, and a slider smooths. Pages follow the reader's choice of light or dark, and fit a telephone. Columns of tables
sort by a click.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from html import escape
from importlib.resources import files
from typing import Literal

COLORS = 8
"""The number of colours; more curves start again with the first."""
# uPlot subtracts and scales: the width of a range must be a float too.
_LARGEST = 1e300
_LONGEST = 60
# Nothing is loaded, and what a run has logged cannot run: its texts are escaped, and its numbers are JSON.
_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:"


@dataclass(frozen=True)
class Curve:
    """A curve of a chart.

    Attributes:
        label: its name in the legend.
        points: (x, y) by increasing x; the line is interrupted where a y is not finite.
        color: the number of its colour; None draws it in the colour of text.
        width: of the line, in pixels.
        marked: each point is drawn as a circle.
        dashed: the line is dashed.
        stacked: the curve is an area on top of the next stacked curve; all of them have the same x.
    """

    label: str
    points: Sequence[tuple[float, float]]
    color: int | None
    width: float = 1.6
    marked: bool = False
    dashed: bool = False
    stacked: bool = False


@dataclass(frozen=True)
class Cell:
    """A cell of a table.

    Attributes:
        text: what is shown.
        value: what its column is sorted by: a number, a text, or None, which is last.
        color: a curve's colour, shown before the text; clicking it hides and shows the curves of that label.
        label: the label of these curves.
    """

    text: str
    value: float | str | None
    color: int | None = None
    label: str = ""


def document(title: str, *parts: str) -> str:
    """Return the page.

    Args:
        title: its title.
        parts: HTML, such as that of the functions below.
    """
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_asset('uPlot.min.css')}{_asset('charts.css')}</style></head><body>\n"
        + "\n".join(parts)
        + f"\n<script>{_asset('uPlot.iife.min.js')}</script>\n<script>{_asset('charts.js')}</script></body></html>\n"
    )


def chart(
    title: str, curves: Sequence[Curve], x: str = "step", lanes: Sequence[str] = (), unit: Literal["", "s", "B"] = ""
) -> str:
    """Return a chart.

    Args:
        title: its title.
        curves: its curves.
        x: the name of what is on the horizontal axis.
        lanes: names that the vertical axis shows at 0, 1, 2 and so on, instead of numbers.
        unit: of the values: seconds (shown as ms, µs, ...), bytes (shown as MiB, GiB, ...) or none.
    """
    content = {
        "x": x,
        "unit": unit,
        "lanes": list(lanes),
        "curves": [
            {
                "label": curve.label,
                "color": None if curve.color is None else curve.color % COLORS,
                "width": curve.width,
                "marked": curve.marked,
                "dashed": curve.dashed,
                "stacked": curve.stacked,
                "x": [_bounded(step) for step, _ in curve.points],
                "y": [_bounded(value) if math.isfinite(value) else None for _, value in curve.points],
            }
            for curve in curves
        ],
    }
    # "<" would end the element, whatever is logged.
    data = json.dumps(content, allow_nan=False, ensure_ascii=False).replace("<", "\\u003c")
    return (
        f'<figure class="chart"><figcaption>{escape(title)}</figcaption><div class="plot"></div>'
        f'<script type="application/json">{data}</script></figure>'
    )


def charts(figures: Sequence[str]) -> str:
    """Charts in as many columns as fit."""
    return f'<div class="charts">{"".join(figures)}</div>'


def smoothing(weight: float) -> str:
    """Return a slider that smooths all curves of the page with an exponential moving average, but not areas and lanes.

    Args:
        weight: the weight of past values at first, from 0 (no smoothing) to 0.99.
    """
    return (
        '<label class="soft smoothing">Smoothing <input type="range" id="smoothing" min="0" max="0.99" step="0.01" '
        f'value="{weight}"><output>{weight:.2f}</output></label>'
    )


def facts(found: Mapping[str, str]) -> str:
    """Return what a reader should see first: values in large letters, below their names."""
    cards = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in found.items())
    return f'<dl class="facts">{cards}</dl>'


def table(columns: Mapping[str, str], rows: Sequence[Mapping[str, Cell]]) -> str:
    """Return a table whose columns sort, and whose first one stays where it is while the others scroll.

    Args:
        columns: the heading of each column, by its key.
        rows: the cells of each row, by the key of their column.
    """
    head = "".join(
        f'<th scope="col"{_kind(rows, column)}><button type="button">{escape(heading)}</button></th>'
        for column, heading in columns.items()
    )
    body = "".join(f"<tr>{''.join(_cell(row.get(column)) for column in columns)}</tr>" for row in rows)
    return (
        f'<div class="table"><table class="sortable"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def _kind(rows: Sequence[Mapping[str, Cell]], column: str) -> str:
    """Headings are where the cells of their column are: numbers on the right."""
    values = [row[column].value for row in rows if column in row and row[column].value is not None]
    return ' class="number"' if values and not any(isinstance(value, str) for value in values) else ""


def _cell(cell: Cell | None) -> str:
    if cell is None:
        return "<td></td>"
    kind, sort = "", ""
    if isinstance(cell.value, str):
        sort = f' data-sort="{escape(cell.value)}"'
    elif cell.value is not None:
        kind, sort = ' class="number"', f' data-number="{cell.value!r}"'
    text = escape(cell.text)
    if len(cell.text) > _LONGEST:
        text = f'<span title="{text}">{escape(cell.text[:_LONGEST])}…</span>'
    if cell.color is not None:
        label = escape(cell.label)
        key = f'class="key" style="background:var(--curve-{cell.color % COLORS})"'
        text = (
            f'<button type="button" {key} data-label="{label}" aria-pressed="true" title="hide or show"></button>{text}'
        )
    return f"<td{kind}{sort}>{text}</td>"


def _bounded(number: float) -> float:
    return max(-_LARGEST, min(float(number), _LARGEST))


@cache
def _asset(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8").strip()

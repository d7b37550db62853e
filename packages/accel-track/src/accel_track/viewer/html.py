"""A self-contained HTML page of runs, without external resources."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

from ..jsonl_reader import Run
from .terminal import Chart, fraction, text_of

_COLORS = ("#1f77b4", "#d62728", "#2ca02c", "#ff7f0e", "#9467bd", "#8c564b", "#e377c2", "#17becf")
_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 460, 240, 56, 24, 8
_STYLE = """
:root { color-scheme: light dark }
body { font: 14px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 62rem; padding: 0 1rem }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(28rem, 1fr)); gap: 1rem } figure { margin: 0 }
svg { width: 100%; height: auto } svg text { font-size: 11px; fill: currentColor }
.axis { stroke: currentColor; opacity: .35 }
table { border-collapse: collapse } td, th { padding: .15rem .8rem .15rem 0; text-align: left; vertical-align: top }
td.number { font-variant-numeric: tabular-nums } pre { overflow: auto; max-height: 24rem }
.key { display: inline-block; width: .8em; height: .8em }
"""
_SCRIPT = """
for (const svg of document.querySelectorAll("svg")) {
  const curves = JSON.parse(svg.dataset.curves), note = svg.querySelector(".note");
  svg.addEventListener("pointermove", event => {
    const x = (event.clientX - svg.getBoundingClientRect().left) / svg.clientWidth * svg.viewBox.baseVal.width;
    note.textContent = curves.map(([name, points]) => {
      let best = null;
      for (const p of points)
        if (p[1] !== null && (best === null || Math.abs(p[2] - x) < Math.abs(best[2] - x))) best = p;
      const prefix = curves.length > 1 ? name.split("/").pop() + " " : "";
      return best === null ? "" : prefix + best[0] + ": " + Number(best[1].toPrecision(6));
    }).join("   ");
  });
}
"""


def write_html(runs: Sequence[Run], charts: Sequence[Chart], path: Path, patterns: Sequence[str] = ()) -> None:
    """Write a page with the facts, configs and last values of ``runs``, and the curves of ``charts``.

    Args:
        runs: the runs.
        charts: their curves.
        path: the file.
        patterns: shell patterns of the values to list; empty lists all.
    """
    colors = {run.name: _COLORS[index % len(_COLORS)] for index, run in enumerate(runs)}
    page = (
        '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{escape(', '.join(run.name for run in runs))}</title><style>{_STYLE}</style><h1>Runs</h1>"
        + "".join(_run(run, colors[run.name], patterns) for run in runs)
        + '<h2>Curves</h2><div class="charts">'
        + "".join(_figure(chart, colors) for chart in charts)
        + f"</div><script>{_SCRIPT}</script></html>\n"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8", errors="backslashreplace")


def _run(run: Run, color: str, patterns: Sequence[str]) -> str:
    values = "".join(
        f'<tr><td>{escape(name)}<td class="number">{escape(text_of(value) if isinstance(value, float) else str(value))}'
        f"<td>{'' if step is None else step}"
        for name, (step, value) in run.last(patterns).items()
    )
    facts = " · ".join(escape(str(run.facts[name])) for name in ("status", "started", "host") if name in run.facts)
    config = escape(json.dumps(run.facts.get("config", {}), indent=2, ensure_ascii=False))
    return (
        f'<h3><span class="key" style="background:{color}"></span> {escape(run.name)}</h3><p>{facts}</p>'
        f"<table><tr><th>last value<th><th>step{values}</table>"
        f"<details><summary>config</summary><pre>{config}</pre></details>"
    )


def _figure(chart: Chart, colors: dict[str, str]) -> str:
    first, last, low, high = chart.limits()

    def locate(step: float, value: float) -> tuple[float, float]:
        x = _LEFT + fraction(step, first, last) * (_WIDTH - _LEFT - 8)
        return round(x, 1), round(_TOP + (1.0 - fraction(value, low, high)) * (_HEIGHT - _TOP - _BOTTOM), 1)

    lines, data = [], []
    for name, points in chart.curves.items():
        lines += [_line(part, colors[name]) for part in _parts(points, locate)]
        data.append(
            [name, [[step, value if math.isfinite(value) else None, locate(step, low)[0]] for step, value in points]]
        )
    left, bottom = _LEFT - 4, _HEIGHT - _BOTTOM
    marks = (
        f'<text x="{left}" y="{_TOP + 8}" text-anchor="end">{text_of(high)}</text>'
        f'<text x="{left}" y="{bottom}" text-anchor="end">{text_of(low)}</text>'
        f'<text x="{_LEFT}" y="{_HEIGHT - 8}">{text_of(first)}</text>'
        f'<text x="{_WIDTH - 8}" y="{_HEIGHT - 8}" text-anchor="end">{text_of(last)}</text>'
        f'<text class="note" x="{_WIDTH / 2}" y="{_HEIGHT - 8}" text-anchor="middle"></text>'
        f'<path class="axis" fill="none" d="M{_LEFT} {_TOP}V{bottom}H{_WIDTH - 8}"/>'
    )
    curves = escape(json.dumps(data), quote=True)
    return (
        f"<figure><figcaption>{escape(chart.metric)}</figcaption>"
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" data-curves="{curves}">{marks}{"".join(lines)}</svg></figure>'
    )


def _line(part: str, color: str) -> str:
    if " " not in part:  # a line with one point would not be drawn
        x, y = part.split(",")
        return f'<circle cx="{x}" cy="{y}" r="3" fill="{color}"/>'
    return f'<polyline fill="none" stroke="{color}" stroke-width="1.6" points="{part}"/>'


def _parts(points: list[tuple[float, float]], locate: Callable[[float, float], tuple[float, float]]) -> list[str]:
    """The connected parts of a curve, which is interrupted where a value is not finite."""
    parts: list[list[str]] = [[]]
    for step, value in points:
        if math.isfinite(value):
            x, y = locate(step, value)
            parts[-1].append(f"{x},{y}")
        elif parts[-1]:
            parts.append([])
    return [" ".join(part) for part in parts if part]

"""The HTML page of runs: their curves, a table of what they were given and ended with, and their configurations."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, Literal

from accel_state.charts.page import Cell, Curve, chart, document, smoothing, table
from accel_state.charts.page import charts as grid_of

from ..jsonl_reader import Run
from .labels import differing_settings, flat_config, run_labels, short_names
from .terminal import Chart, text_of

_FACTS = ("status", "started", "host")
# Before the name of a setting or a value, as the key of its column: it may have the name of a fact.
_SETTING, _VALUE = "config.", "value."
_MONITOR = "monitor/"
"""Before the names of what ``accel launch --monitor`` adds; the page has these values in a part of their own."""
_UNITS: dict[str, Literal["s", "B"]] = {"seconds": "s", "bytes": "B"}  # by the last word of a name


def write_html(
    runs: Sequence[Run], charts: Sequence[Chart], path: Path, patterns: Sequence[str] = (), weight: float = 0.0
) -> None:
    """Write a page with the curves of ``charts``, and the facts, configs and last values of ``runs``.

    Args:
        runs: the runs.
        charts: their curves, not smoothed.
        path: the file.
        patterns: shell patterns of the values to list; empty lists all.
        weight: of past values in the moving average that the page shows at first; its slider changes it.
    """
    configs = {run.name: flat_config(run.facts.get("config")) for run in runs}
    differing = differing_settings(configs.values())
    colors = {run.name: number for number, run in enumerate(runs)}
    names = short_names(list(colors))
    labels = run_labels(runs)
    own = [_figure(item, labels, colors) for item in charts if not item.metric.startswith(_MONITOR)]
    sources = [
        f"<details><summary>{escape(run.name)}</summary><pre>"
        f"{escape(json.dumps(run.facts.get('config', {}), indent=2, ensure_ascii=False))}</pre></details>"
        for run in runs
    ]
    projects = list(dict.fromkeys(name.rpartition("/")[0] or name for name in colors))
    page = document(
        ", ".join(projects),
        f"<h1>{escape(', '.join(projects))}</h1>",
        f'<p class="soft">{len(runs)} run{"" if len(runs) == 1 else "s"}. Drag over a chart to zoom, double-click to '
        "zoom out; click a name in a legend, or a colour in the table, to hide a run.</p>",
        smoothing(weight),
        grid_of(own),
        _monitored(charts, labels, colors, is_open=not own),
        "<h2>Runs</h2>",
        table(*_rows(runs, colors, names, labels, configs, differing, patterns)),
        "<h2>Configurations</h2>",
        *sources,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8", errors="backslashreplace")


def _figure(item: Chart, labels: Mapping[str, str], colors: Mapping[str, int]) -> str:
    curves = [Curve(labels[name], points, colors[name]) for name, points in item.curves.items()]
    return chart(item.metric, curves, unit=_unit(item.metric))


def _unit(metric: str) -> Literal["", "s", "B"]:
    return _UNITS.get(metric.rpartition("_")[2], "")


def _monitored(charts: Sequence[Chart], labels: Mapping[str, str], colors: Mapping[str, int], is_open: bool) -> str:
    """Return the charts of the monitor's values in a part that opens, or nothing.

    The parts of a step of a single run are the areas of one chart, whose height is the time of the step.
    """
    found = [item for item in charts if item.metric.startswith(_MONITOR)]
    parts = [item for item in found if _unit(item.metric) == "s" and item.metric != f"{_MONITOR}step_seconds"]
    figures = []
    if len(colors) == 1 and len(parts) > 1:
        found = [item for item in found if item not in parts]
        curves = []
        for color, item in enumerate(parts):
            (points,) = item.curves.values()
            part = item.metric.removeprefix(_MONITOR).rpartition("_")[0]
            curves.append(Curve(part, points, color, stacked=True))
        figures.append(chart("Seconds of a step by part", curves, unit="s"))
    figures += [_figure(item, labels, colors) for item in found]
    if not figures:
        return ""
    state = " open" if is_open else ""
    summary = "What the monitor measured: the time of a step by part, throughput and memory"
    return f"<details{state}><summary>{summary}</summary>{grid_of(figures)}</details>"


def _rows(
    runs: Sequence[Run],
    colors: Mapping[str, int],
    names: Mapping[str, str],
    labels: Mapping[str, str],
    configs: Mapping[str, Mapping[str, Any]],
    differing: Sequence[str],
    patterns: Sequence[str],
) -> tuple[dict[str, str], list[dict[str, Cell]]]:
    """Return the columns, by key, and the rows of the table: settings that differ, last values, and facts."""
    columns = {"run": "run", **{f"{_SETTING}{key}": f"{_SETTING}{key}" for key in differing}}
    last_values = {run.name: run.last(patterns) for run in runs}
    columns |= {f"{_VALUE}{name}": name for values in last_values.values() for name in values}
    columns |= {fact: fact for fact in ("step", *_FACTS)}
    rows = []
    for run in runs:
        config = configs[run.name]
        row = {"run": Cell(names[run.name], run.name, colors[run.name], labels[run.name])}
        row |= {fact: _cell(run.facts[fact]) for fact in _FACTS if fact in run.facts}
        last = last_values[run.name]
        steps = [step for step, _ in last.values() if isinstance(step, (int, float)) and not isinstance(step, bool)]
        if steps:
            row["step"] = _cell(max(steps))
        row |= {f"{_VALUE}{name}": _cell(value) for name, (_, value) in last.items()}
        row |= {f"{_SETTING}{key}": _cell(config[key]) for key in differing if key in config}
        rows.append(row)
    present = {column for row in rows for column in row}
    return {key: heading for key, heading in columns.items() if key in present}, rows


def _cell(value: Any) -> Cell:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        try:
            number = float(value)
        except OverflowError:
            return Cell(str(value), str(value))
        return Cell(text_of(value) if isinstance(value, float) else str(value), number)
    return Cell(str(value), str(value))

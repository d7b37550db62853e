"""The HTML page of runs: their curves, a table of what they were given and ended with, and their configurations."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from accel_state.charts.page import Cell, Curve, chart, document, table
from accel_state.charts.page import charts as grid_of

from ..jsonl_reader import Run
from .terminal import Chart, text_of

_FACTS = ("status", "started", "host")
# Before the name of a setting or a value, as the key of its column: it may have the name of a fact.
_SETTING, _VALUE = "config.", "value."


def write_html(runs: Sequence[Run], charts: Sequence[Chart], path: Path, patterns: Sequence[str] = ()) -> None:
    """Write a page with the curves of ``charts``, and the facts, configs and last values of ``runs``.

    Args:
        runs: the runs.
        charts: their curves.
        path: the file.
        patterns: shell patterns of the values to list; empty lists all.
    """
    colors = {run.name: number for number, run in enumerate(runs)}
    names = _short_names(list(colors))
    figures = []
    for item in charts:
        curves = [Curve(names[name], points, colors[name]) for name, points in item.curves.items()]
        figures.append(chart(item.metric, curves))
    configs = [
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
        grid_of(figures),
        "<h2>Runs</h2>",
        table(*_rows(runs, colors, names, patterns)),
        "<h2>Configurations</h2>",
        *configs,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8", errors="backslashreplace")


def _short_names(names: Sequence[str]) -> dict[str, str]:
    """Return the names without the project, where that leaves them distinct."""
    short = [name.rpartition("/")[2] for name in names]
    return {name: end if short.count(end) == 1 else name for name, end in zip(names, short, strict=True)}


def _rows(
    runs: Sequence[Run], colors: Mapping[str, int], names: Mapping[str, str], patterns: Sequence[str]
) -> tuple[dict[str, str], list[dict[str, Cell]]]:
    """Return the columns, by key, and the rows of the table: settings that differ, last values, and facts."""
    configs = [_flat(run.facts.get("config")) for run in runs]
    differing = []
    for key in dict.fromkeys(key for config in configs for key in config):
        if len({repr(config.get(key)) for config in configs}) > 1:
            differing.append(key)
    columns = {"run": "run", **{f"{_SETTING}{key}": f"{_SETTING}{key}" for key in differing}}
    last_values = {run.name: run.last(patterns) for run in runs}
    columns |= {f"{_VALUE}{name}": name for values in last_values.values() for name in values}
    columns |= {fact: fact for fact in ("step", *_FACTS)}
    rows = []
    for run, config in zip(runs, configs, strict=True):
        row = {"run": Cell(names[run.name], run.name, colors[run.name], names[run.name])}
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


def _flat(config: Any, prefix: str = "") -> dict[str, Any]:
    """Return a nested configuration, with keys joined by dots."""
    if not isinstance(config, dict):
        return {}
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict) and value:
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat

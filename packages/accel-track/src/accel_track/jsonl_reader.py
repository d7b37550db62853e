"""Reader for the files that the jsonl tracker writes. Torch-free."""

from __future__ import annotations

import csv
import fnmatch
import json
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accel_state.errors import ConfigurationError, check_type
from accel_state.paths import as_path, open_for_writing

RUN_NAME = "run.json"
METRICS_NAME = "metrics.jsonl"
CSV_NAME = "metrics.csv"
STEP, TIME, RESUMED = "_step", "_time", "_resumed_after"

_NOT_FINITE = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}


@dataclass
class Run:
    """A run of the jsonl tracker.

    Attributes:
        folder: its directory.
        facts: content of run.json: project, run_id, status, config and so on.
        rows: one dictionary per call of ``log``, in order, with ``_step`` and ``_time`` (seconds since 1970).
        damaged: number of unreadable lines, such as one that was being written when the process was killed.
        prefix: put before the name, where runs of different directories have the same one.
    """

    folder: Path
    facts: dict[str, Any] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    damaged: int = 0
    prefix: str = ""

    @property
    def name(self) -> str:
        """Project and run id, joined by a slash."""
        project, run_id = self.facts.get("project", self.folder.parent.name), self.facts.get("run_id", self.folder.name)
        return f"{self.prefix}{project}/{run_id}"

    def series(self) -> dict[str, list[tuple[float, float]]]:
        """Points (step, value) of every numeric metric, by name; a row without a step follows the previous one."""
        series: dict[str, dict[float, float]] = {}
        step = -1.0
        for row in self.rows:
            logged_step = _number(row.get(STEP))
            step = logged_step if logged_step is not None and math.isfinite(logged_step) else step + 1
            for name, value in row.items():
                number = _number(value)
                if name not in (STEP, TIME) and number is not None:
                    series.setdefault(name, {})[step] = number
        return {name: sorted(points.items()) for name, points in series.items()}

    def last(self, patterns: Sequence[str] = ()) -> dict[str, tuple[Any, Any]]:
        """Return the latest (step, value) of what was logged, by name; with shell patterns, only of matching names."""
        last: dict[str, tuple[Any, Any]] = {}
        for row in self.rows:
            last.update((name, (row.get(STEP), value)) for name, value in row.items() if name not in (STEP, TIME))
        return {name: entry for name, entry in last.items() if matches(name, patterns)}

    def write_csv(self, path: Path, patterns: Sequence[str] = ()) -> None:
        """Write all rows as comma-separated values, one column per name; with shell patterns, only matching names."""
        names = dict.fromkeys(name for row in self.rows for name in row)
        columns = [name for name in names if name in (STEP, TIME) or matches(name, patterns)]
        columns.sort(key=lambda name: (name != STEP, name != TIME))
        partial = path.with_name(f"{path.name}.partial")
        with open(open_for_writing(partial), "w", newline="", encoding="utf-8", errors="backslashreplace") as file:
            writer = csv.DictWriter(file, columns, extrasaction="ignore")
            writer.writeheader()
            writer.writerows({name: _cell(value) for name, value in row.items()} for row in self.rows)
        partial.replace(path)


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Return True if a name matches one of some shell patterns; without patterns, every name does."""
    return not patterns or any(fnmatch.fnmatch(name, pattern) for pattern in patterns)


def _number(value: Any) -> float | None:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            return math.inf if value > 0 else -math.inf
    return _NOT_FINITE.get(value) if isinstance(value, str) else None


def _cell(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, (dict, list)) else value


def read_run(folder: str | os.PathLike[str]) -> Run:
    """Read a run, which may still be in progress.

    Args:
        folder: the directory with metrics.jsonl.

    Raises:
        ConfigurationError: there is no metrics.jsonl, or run.json is damaged.
    """
    folder = as_path("folder", folder)
    metrics, facts = folder / METRICS_NAME, folder / RUN_NAME
    if not metrics.is_file():
        raise ConfigurationError(f"{folder} has no {METRICS_NAME}. Pass a directory written with log_with='jsonl'.")
    run = Run(folder)
    if facts.is_file():
        try:
            run.facts = json.loads(facts.read_text(encoding="utf-8"))
            if not isinstance(run.facts, dict):
                raise ValueError(f"expected a JSON object, got {type(run.facts).__name__}")
        except (ValueError, RecursionError) as error:
            raise ConfigurationError(
                f"{facts} is damaged: {error}. Delete it to read the metrics without it."
            ) from error
    with metrics.open(encoding="utf-8", errors="replace") as file:
        _read_rows(run, file)
    return run


def _read_rows(run: Run, lines: Iterable[str]) -> None:
    for line in lines:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            run.damaged += 1
            continue
        if not isinstance(row, dict):
            run.damaged += 1
        elif RESUMED in row:
            run.rows = _rows_up_to(run.rows, _number(row[RESUMED]))
        else:
            run.rows.append(row)


def _rows_up_to(rows: list[dict[str, Any]], last_step: float | None) -> list[dict[str, Any]]:
    if last_step is None:
        return rows
    steps = [_number(row.get(STEP)) for row in rows]
    return [row for row, step in zip(rows, steps, strict=True) if step is None or step <= last_step]


def find_runs(
    folder: str | os.PathLike[str] | Iterable[str | os.PathLike[str]], names: str | Sequence[str] = ()
) -> list[Run]:
    """Return all runs in directories and their subdirectories, oldest first.

    Args:
        folder: the directory of a run, or one that contains runs; or several of these.
        names: keep only runs whose project/run_id contains one of these; or one such text.

    Raises:
        ConfigurationError: a folder is not a path, there is no such directory, or no run in it.
    """
    names = [names] if isinstance(names, str) else names
    given = [folder] if isinstance(folder, (str, os.PathLike)) else folder
    check_type(given, Iterable, "folder", "Give the directory of a run, one that contains runs, or a list of these.")
    folders = [as_path("folder", entry) for entry in given]
    for path in folders:
        if not path.is_dir():
            raise ConfigurationError(
                f"directory not found: {str(path)!r}. Pass the logging_dir of a run logged with 'jsonl'."
            )
    files = [path for parent in folders for path in sorted(parent.rglob(METRICS_NAME))]
    found = {path.resolve(): path.parent for path in files}
    runs = _distinct([read_run(path) for path in found.values()])
    runs.sort(key=lambda run: (str(run.facts.get("started", "")), run.name))
    selected = [run for run in runs if not names or any(name in run.name for name in names)]
    if not selected:
        known = f" Existing runs: {', '.join(run.name for run in runs)}." if runs else " Log one with log_with='jsonl'."
        raise ConfigurationError(
            f"{', '.join(map(str, folders))} contains no run"
            + (f" named {' or '.join(names)}." if names else ".")
            + known
        )
    return selected


def _distinct(runs: list[Run]) -> list[Run]:
    """Return the runs; equal names are prefixed with the directory that contains the project's."""
    names = [run.name for run in runs]
    for run, name in zip(runs, names, strict=True):
        if names.count(name) > 1:
            run.prefix = f"{run.folder.parent.parent}/"
    return runs

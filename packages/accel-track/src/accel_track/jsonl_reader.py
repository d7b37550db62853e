"""The files of a run that the JSON-lines tracker writes: reading them. Torch-free."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accel_state.errors import ConfigurationError

RUN_NAME = "run.json"
METRICS_NAME = "metrics.jsonl"
CSV_NAME = "metrics.csv"
STEP, TIME, RESUMED = "_step", "_time", "_resumed_after"

_NOT_FINITE = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}


@dataclass
class Run:
    """One run.

    Attributes:
        folder: where it is.
        facts: what run.json holds: project, run_id, status, config and so on.
        rows: one dictionary for each call of ``log``, in order, with ``_step`` and ``_time`` (seconds since 1970).
        damaged: lines that could not be read: those that a process was writing when it was killed.
    """

    folder: Path
    facts: dict[str, Any] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    damaged: int = 0

    @property
    def name(self) -> str:
        """Project and run id."""
        return f"{self.facts.get('project', self.folder.parent.name)}/{self.facts.get('run_id', self.folder.name)}"

    def series(self) -> dict[str, list[tuple[float, float]]]:
        """Points (step, value) of every metric that has numbers, by its name; rows without a step count on from the one
        before.
        """
        found: dict[str, dict[float, float]] = {}
        step = -1.0
        for row in self.rows:
            given = _number(row.get(STEP))
            step = given if given is not None and math.isfinite(given) else step + 1
            for name, value in row.items():
                number = _number(value)
                if name not in (STEP, TIME) and number is not None:
                    found.setdefault(name, {})[step] = number
        return {name: sorted(points.items()) for name, points in found.items()}

    def last(self) -> dict[str, tuple[Any, Any]]:
        """The latest value of everything that was logged, with its step, by name."""
        return {
            name: (row.get(STEP), value) for row in self.rows for name, value in row.items() if name not in (STEP, TIME)
        }

    def write_csv(self, path: Path) -> None:
        """Write all rows as a table of comma-separated values, one column for each name."""
        columns = list(dict.fromkeys(name for row in self.rows for name in row))
        columns = [
            *(name for name in (STEP, TIME) if name in columns),
            *(name for name in columns if name not in (STEP, TIME)),
        ]
        partial = path.with_name(f"{path.name}.partial")
        with partial.open("w", newline="", encoding="utf-8", errors="backslashreplace") as file:
            writer = csv.DictWriter(file, columns)
            writer.writeheader()
            writer.writerows({name: _cell(value) for name, value in row.items()} for row in self.rows)
        partial.replace(path)


def _number(value: Any) -> float | None:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            return math.inf if value > 0 else -math.inf
    return _NOT_FINITE.get(value) if isinstance(value, str) else None


def _cell(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, (dict, list)) else value


def read_run(folder: Path) -> Run:
    """Read a run, also one that is being written.

    Args:
        folder: the folder with metrics.jsonl.

    Raises:
        ConfigurationError: there is no such file, or run.json is damaged.
    """
    metrics, facts = folder / METRICS_NAME, folder / RUN_NAME
    if not metrics.is_file():
        raise ConfigurationError(
            f"{folder} has no {METRICS_NAME}, so it is no run of the jsonl tracker. Log one with log_with='jsonl'."
        )
    run = Run(folder)
    if facts.is_file():
        try:
            run.facts = _object(facts.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise ConfigurationError(
                f"{facts} is damaged: {error}. Delete it to see the metrics without it."
            ) from error
    with metrics.open(encoding="utf-8", errors="replace") as file:
        _read_rows(run, file)
    return run


def _object(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError(f"it holds {type(value).__name__}, and no object with the facts of a run")
    return value


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
            after = _number(row[RESUMED])
            run.rows = [
                kept for kept in run.rows if after is None or (step := _number(kept.get(STEP))) is None or step <= after
            ]
        else:
            run.rows.append(row)


def find_runs(folder: Path, names: Sequence[str] = ()) -> list[Run]:
    """The runs in a folder: it is one, or contains some at any depth; oldest first.

    Args:
        folder: where to look.
        names: keep those whose project/run_id contains one of these.

    Raises:
        ConfigurationError: there is no such folder, or no run in it.
    """
    if not folder.is_dir():
        raise ConfigurationError(
            f"there is no folder {str(folder)!r}. Give the logging_dir of a run that was logged with 'jsonl'."
        )
    runs = sorted(map(read_run, _folders(folder)), key=lambda run: (str(run.facts.get("started", "")), run.name))
    chosen = [run for run in runs if not names or any(name in run.name for name in names)]
    if not chosen:
        known = f" Runs there: {', '.join(run.name for run in runs)}." if runs else " Log one with log_with='jsonl'."
        raise ConfigurationError(f"{folder} holds no run" + (f" named {' or '.join(names)}." if names else ".") + known)
    return chosen


def _folders(folder: Path) -> Iterator[Path]:
    return (path.parent for path in sorted(folder.rglob(METRICS_NAME)))

"""A run as plain files: JSON lines for programs and for ``accel track show``, a table for spreadsheets. Needs nothing."""

from __future__ import annotations

import json
import os
import platform
import secrets
import shutil
import sys
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from accel_state.errors import ConfigurationError

from ..base import GeneralTracker
from ..jsonl_reader import CSV_NAME, METRICS_NAME, RESUMED, RUN_NAME, STEP, TIME, read_run
from ..rank_info import on_main_process
from ..serialize import as_number, flatten, to_json, to_plain


class JSONLinesTracker(GeneralTracker):
    """Writes ``<logging_dir>/<run_name>/<run id>/``, with

    - ``run.json``: project, run id, status ("running", "finished" or "failed"), command, host and config;
    - ``metrics.jsonl``: a line for each call of ``log``: ``{"_step": 3, "_time": 1764000000.1, "loss": 0.25}``. Nested
      dictionaries become ``train/loss``; what is not finite becomes ``"NaN"``, ``"Infinity"`` or ``"-Infinity"``;
    - ``metrics.csv``: the same as a table, written at the end;
    - ``images/``, ``tables/``, ``artifacts/``.

    A line is on its way to the disk when it is logged: a process that is killed leaves at most the last one incomplete.

    Args:
        run_name: name of the project.
        logging_dir: the folder.
        run_id: names this run, to continue one; a new one by default.
        csv: write the table.
    """

    name = "jsonl"
    requires_logging_directory = True

    def __init__(
        self, run_name: str, logging_dir: str | os.PathLike[str], run_id: str | None = None, csv: bool = True
    ) -> None:
        super().__init__()
        self.run_name = run_name
        self.logging_dir = Path(logging_dir)
        if not (self.logging_dir / run_name).resolve().is_relative_to(self.logging_dir.resolve()):
            raise ConfigurationError(
                f"the project name {run_name!r} leads out of {self.logging_dir}. Choose one without '..' and leading "
                "'/'."
            )
        self.csv = csv
        self._run_id = run_id
        self._resumed_step: int | None = None
        self._file: int | None = None
        self._facts: dict[str, Any] = {}

    @property
    def tracker(self) -> Path:
        """The folder of the run.

        Raises:
            ConfigurationError: the run has not started.
        """
        if self._run_id is None:
            raise ConfigurationError(f"the run {self.run_name!r} has no folder yet. Call start() first.")
        return self.logging_dir / self.run_name / self._run_id

    @property
    def run_id(self) -> str | None:
        """The name of the folder."""
        return self._run_id

    def resume(self, run_id: str, step: int | None = None) -> None:
        self._run_id, self._resumed_step = run_id, step

    @on_main_process
    def start(self) -> None:
        if self._run_id is None:
            self._run_id = f"{datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"
        folder = self.tracker
        folder.mkdir(parents=True, exist_ok=True)
        resumed = (folder / METRICS_NAME).exists()
        self._facts = read_run(folder).facts if resumed else {}
        self._facts.setdefault("started", _now())
        self._facts.update(
            {
                "format": 1,
                "project": self.run_name,
                "run_id": self._run_id,
                "status": "running",
                "host": platform.node(),
                "command": sys.argv,
            }
        )
        # Without a buffer: a process forked from this one would write what is in it a second time.
        self._file = os.open(folder / METRICS_NAME, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        if resumed:
            # The line before may lack its end, if the process was killed.
            mark = {} if self._resumed_step is None else {RESUMED: self._resumed_step}
            os.write(
                self._file,
                ("\n" + (json.dumps(mark) + "\n" if mark else "")).encode() if _is_cut(folder) or mark else b"",
            )
        self._write_facts()

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self._facts["config"] = to_json(to_plain(values))
        self._write_facts()

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        row = {
            STEP: step,
            TIME: round(time.time(), 3),
            **flatten({name: _plain(value) for name, value in values.items()}, "/"),
            **kwargs,
        }
        line = json.dumps(to_json(row), ensure_ascii=False, allow_nan=False) + "\n"
        self._write(line.encode(errors="backslashreplace"))

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Write images as ``images/<name>/<step>_<index>.png``."""
        from ..images import as_images, write_png

        for name, value in values.items():
            folder = self._folder("images", name)
            for index, image in enumerate(as_images(value)):
                write_png(image, folder / f"{_step(step)}_{index}.png")

    @on_main_process
    def log_table(
        self,
        table_name: str,
        columns: list[str] | None = None,
        data: list[list[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Write a table as ``tables/<name>/<step>.json``: ``{"columns": [...], "data": [[...], ...]}``."""
        if dataframe is not None:
            columns, data = [str(column) for column in dataframe.columns], dataframe.to_numpy().tolist()
        table = to_json(to_plain({"columns": columns, "data": data}))
        (self._folder("tables", table_name) / f"{_step(step)}.json").write_text(
            json.dumps(table, ensure_ascii=False), encoding="utf-8"
        )

    @on_main_process
    def log_artifact(self, local_path: str, artifact_path: str | None = None) -> None:
        """Copy a file into ``artifacts/``."""
        shutil.copy2(local_path, self._folder("artifacts", artifact_path or ""))

    @on_main_process
    def discard(self) -> None:
        """Delete the folder."""
        self._close()
        shutil.rmtree(self.tracker)

    @on_main_process
    def finish(self) -> None:
        if self._file is None:
            return
        self._close()
        self._facts.update({"status": "failed" if self.failed else "finished", "ended": _now()})
        self._write_facts()
        if self.csv:
            read_run(self.tracker).write_csv(self.tracker / CSV_NAME)

    def _write(self, data: bytes) -> None:
        if self._file is None:
            raise ConfigurationError(
                f"the run {self.run_name!r} is not open. Call start() first, and log before finish()."
            )
        while data:
            data = data[os.write(self._file, data) :]

    def _write_facts(self) -> None:
        partial = self.tracker / f"{RUN_NAME}.partial"
        partial.write_text(
            json.dumps(self._facts, indent=2, ensure_ascii=False) + "\n", encoding="utf-8", errors="backslashreplace"
        )
        partial.replace(self.tracker / RUN_NAME)

    def _folder(self, kind: str, name: str) -> Path:
        base = self.tracker / kind
        folder = (base / name).resolve()
        if not folder.is_relative_to(base.resolve()):
            raise ConfigurationError(
                f"the name {name!r} leads out of the folder of the run. Choose one without '..' and without a leading "
                "'/'."
            )
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


def _plain(value: Any) -> Any:
    number = as_number(value)
    return value if isinstance(value, bool) else number if number is not None else to_plain(value)


def _is_cut(folder: Path) -> bool:
    with (folder / METRICS_NAME).open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(size - 1, 0))
        return file.read(1) not in (b"", b"\n")


def _step(step: int | None) -> str:
    return "final" if step is None else f"{step:08d}"


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")

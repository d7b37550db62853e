"""The progress of replicas on other machines, in the files where the replicas of this one report theirs. Torch-free.

A replica that is started again reads them, so that it does not begin a run of its own while others train.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class ForeignReports:
    """Those that are shown in a directory."""

    _shown: dict[str, str] = field(default_factory=dict)  # by file

    def show(self, directory: Path, reports: Mapping[str, str]) -> None:
        """Write reports by the name of their files, and remove those that are not among them any more."""
        for name, text in reports.items():
            if self._shown.get(name) != text:
                part = directory / f".{name}.{os.getpid()}"
                part.write_text(text, encoding="utf-8")
                part.replace(directory / name)
        for name in self._shown.keys() - reports.keys():
            (directory / name).unlink(missing_ok=True)
        self._shown = dict(reports)

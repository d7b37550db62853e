"""Trackers of a run whose replicas may be killed: one run, continued by another replica, with every step once."""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from accel_state import env
from accel_track.tracking import Settings, TrackerRun

from .replica_group import DIRECTORY

# Calls of log() that a replica remembers, for the case that the one that leads dies before its trackers have them.
_REMEMBERED = 64


class Member(Protocol):
    """What is asked of the strategy."""

    committed: bool

    @property
    def leads(self) -> bool:
        """Whether this replica logs."""

    @property
    def steps(self) -> int:
        """Steps that were committed before the one in progress."""


class ReplicaTracking(TrackerRun):
    """The trackers of a replica, which log while it leads.

    What is logged for a step that was not committed is dropped: the step is repeated.
    """

    def __init__(self, run: TrackerRun, member: Member) -> None:
        self.__dict__.update(run.__dict__)
        self._member = member
        self._arguments: tuple[Any, ...] | None = None
        self._recent: deque[tuple[Mapping[str, Any], int, Settings]] = deque(maxlen=_REMEMBERED)
        directory = env.read_str(DIRECTORY)
        self._runs_file = None if directory is None else Path(directory) / "trackers.json"

    def init_trackers(self, project_name: str, config: Any = None, init_kwargs: Settings = None) -> None:
        self._arguments = (project_name, config, init_kwargs)
        if self._member.leads:
            self._begin()

    def lead(self, leads: bool) -> None:
        """Begin or cease to log."""
        if not leads:
            self.finish()
        elif self._arguments is not None:
            self._begin()

    def _begin(self) -> None:
        """Start the run, or continue that of a replica that led before."""
        assert self._arguments is not None
        recent = list(self._recent)
        if self._runs_file is not None and self._runs_file.is_file():
            runs = json.loads(self._runs_file.read_text(encoding="utf-8"))
            for run in runs["trackers"].values():
                run["step"] = recent[0][1] - 1 if recent else self._member.steps
            self._to_resume = runs["trackers"]
        super().init_trackers(*self._arguments)
        for values, step, log_kwargs in recent:
            super().log(values, step, log_kwargs)
        self.flush()
        if self._runs_file is not None:
            unfinished = self._runs_file.with_suffix(".part")
            unfinished.write_text(json.dumps(self.state_dict()), encoding="utf-8")
            os.replace(unfinished, self._runs_file)

    def log(self, values: Mapping[str, Any], step: int | None = None, log_kwargs: Settings = None) -> None:
        if not self._member.committed:
            return
        if step is not None and isinstance(values, Mapping):
            copied = {
                name: value.detach().clone() if hasattr(value, "detach") else value for name, value in values.items()
            }
            self._recent.append((copied, int(step), log_kwargs))
        if self._member.leads:
            super().log(values, step, log_kwargs)

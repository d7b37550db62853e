"""Trackers of a run whose replicas may be killed: one run, continued by another replica, with every step once."""

from __future__ import annotations

import json
import logging
import math
import os
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

from accel_state import env
from accel_track.tracking import Settings, TrackerRun

from .replica_group import DIRECTORY
from .transport import StateError, pack, unpack

logger: Final = logging.getLogger(__name__)

# Calls of log() that a replica remembers, for the case that the one that leads dies before its trackers have them.
_REMEMBERED = 64


class Row(NamedTuple):
    """A call of log()."""

    values: dict[str, Any]
    step: int
    log_kwargs: Settings


class Recent:
    """The latest rows of the run, whichever replica has logged them."""

    def __init__(self) -> None:
        self._rows: deque[Row] = deque()
        self._before = -math.inf  # the highest step of the rows that are forgotten

    def add(self, row: Row) -> None:
        """Remember a row; it may be the oldest that is forgotten."""
        self._rows.append(row)
        if len(self._rows) > _REMEMBERED:
            self._before = max(self._before, self._rows.popleft().step)

    def rows_to_repeat(self) -> tuple[int | None, list[Row]]:
        """Return a step, and all rows of the run after it; None if no step is known.

        Of the steps for which that can be said it is the earliest. A script may log some values by the step and others
        by the epoch, so rows after a step need not be the latest ones.
        """
        rows, highest = list(self._rows), self._before
        begin = len(rows)
        below = []  # before each row, the highest step of those that came before it
        for row in rows:
            below.append(highest)
            highest = max(highest, row.step)
        lowest = math.inf
        for index in range(len(rows) - 1, -1, -1):
            lowest = min(lowest, rows[index].step)
            if below[index] < lowest:
                begin, highest = index, lowest - 1
        return None if highest == -math.inf else int(highest), rows[begin:]

    def dump(self) -> tuple[float, list[bytes]]:
        """Return the rows, for a replica that joins: those after the last one that cannot be sent."""
        sent: deque[bytes] = deque()
        for index in range(len(self._rows) - 1, -1, -1):
            try:
                sent.appendleft(pack(tuple(self._rows[index])))
            except StateError as error:
                logger.debug("a row of step %d cannot be sent: %s", self._rows[index].step, error)
                return max(self._before, *(row.step for row in list(self._rows)[: index + 1])), list(sent)
        return self._before, list(sent)

    def load(self, dumped: tuple[float, list[bytes]]) -> None:
        """Take over the rows of another replica of this run."""
        self._before, rows = dumped
        self._rows = deque(Row(*unpack(row)) for row in rows)


class ReplicaTracking(TrackerRun):
    """The trackers of a replica, which log while it leads.

    What is logged for a step that was not committed is dropped: the step is repeated.

    Args:
        run: the trackers of this process.
        member: the strategy, which knows whether this replica leads.
    """

    def __init__(self, run: TrackerRun, member: Any) -> None:
        self.__dict__.update(run.__dict__)
        self._member = member
        self._arguments: tuple[Any, ...] | None = None
        self.recent: Recent = Recent()
        self._undecided: list[tuple[dict[str, Any], int | None, Settings]] = []
        directory = env.read_str(DIRECTORY)
        self._runs_file = None if directory is None else Path(directory) / "trackers.json"

    def init_trackers(self, project_name: str, config: Any = None, init_kwargs: Settings = None) -> None:
        is_first, self._arguments = self._arguments is None, (project_name, config, init_kwargs)
        with self._alone():
            if is_first and self._runs_file is not None and self._runs_file.is_file():
                self._member.step_down()  # this process was slow to start, and another replica has begun to log
            if self._member.leads:
                self._begin()

    def lead(self, leads: bool) -> None:
        """Begin or cease to log."""
        if not leads:
            super().finish()
        elif self._arguments is not None:
            with self._alone():
                self._begin()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep other replicas of this machine from starting a run meanwhile."""
        if self._runs_file is None:
            yield
            return
        import fcntl  # missing where torchft is, too

        with self._runs_file.with_suffix(".lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # which ends with its process
            yield

    def _begin(self) -> None:
        """Start the run, or continue that of a replica that led before."""
        assert self._arguments is not None
        rows: list[Row] = []
        if self._runs_file is not None and self._runs_file.is_file():
            runs = json.loads(self._runs_file.read_text(encoding="utf-8"))
            step, rows = self.recent.rows_to_repeat()
            for run in runs["trackers"].values():
                run["step"] = self._member.steps if step is None else step
            self._to_resume = runs["trackers"]
        super().init_trackers(*self._arguments)
        for row in rows:
            super().log(*row)
        self.flush()
        self._keep_runs()

    def _keep_runs(self) -> None:
        """Write down which runs a replica that leads later continues."""
        if self._runs_file is not None:
            unfinished = self._runs_file.with_suffix(".part")
            unfinished.write_text(json.dumps(self.state_dict()), encoding="utf-8")
            os.replace(unfinished, self._runs_file)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        if self._member.leads and self.has_trackers:
            self._keep_runs()

    def log(self, values: Mapping[str, Any], step: int | None = None, log_kwargs: Settings = None) -> None:
        if not isinstance(values, Mapping):
            super().log(values, step, log_kwargs)  # which raises an error
            return
        # The script may overwrite a tensor before the row is written.
        copied = {name: item.detach().clone() if hasattr(item, "detach") else item for name, item in values.items()}
        step = None if step is None else int(step)
        if self._member.in_step:
            self._undecided.append((copied, step, log_kwargs))
        elif self._member.committed:
            self._log(copied, step, log_kwargs)

    def _log(self, values: dict[str, Any], step: int | None, log_kwargs: Settings) -> None:
        if step is not None:
            self.recent.add(Row(values, step, log_kwargs))
        if self._member.leads:
            super().log(values, step, log_kwargs)

    def decide(self, committed: bool) -> None:
        """Log what was logged while the step was computed, or drop it."""
        undecided, self._undecided = self._undecided, []
        for row in undecided if committed else ():
            self._log(*row)

    def finish(self, failed: bool = False) -> None:
        self.decide(committed=True)  # a script that ends in the middle of a step does not repeat it
        super().finish(failed)

"""A process of a fault-tolerant replica on Ray: an actor that also tells the launcher how the replica progresses.

Torch-free.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from accel_state import run_token
from accel_state.tunnel import TunnelClient

from ..entrypoint import Entrypoint
from .ray_rank import Answer, RankActor
from .replica_reports import ForeignReports

_LOOK_SECONDS = 0.02


@dataclass(frozen=True)
class ReplicaAnswer:
    """What has happened since the last answer, and how the replica is now."""

    answer: Answer
    report: str  # the last report of its progress; empty if there is none
    reported: int  # when it came, in nanoseconds
    is_stopped: bool  # whether the system does not run the process (SIGSTOP)


@dataclass
class ReplicaActor(RankActor):
    """The actor; its methods run in several threads."""

    _progress: Path | None = None
    _here: Path = Path()  # keeps the directory of reports while this actor needs it
    _report: tuple[str, int] = ("", 0)
    _tunnel: TunnelClient | None = None
    _elsewhere: ForeignReports = field(default_factory=ForeignReports)

    def start_replica(
        self,
        entrypoint: Entrypoint,
        directory: str | None,
        variables: Mapping[str, str],
        name: str,
        entrance: tuple[str, int] | None,
        elsewhere: Mapping[str, str],
    ) -> tuple[int, list[Path]]:
        """Start the process; returns its id, and the files that it leaves if this actor is killed.

        Args:
            entrypoint: what it runs.
            directory: where it runs; None for the directory that Ray has brought here.
            variables: those of the process, on top of those of this actor.
            name: of the directory of reports, which the replicas of this node share.
            entrance: where the lighthouse is reached through a tunnel; None on its own machine, where everything runs.
            elsewhere: see :meth:`look`.

        Raises:
            OSError: the process cannot be started.
        """
        reports = Path(tempfile.gettempdir(), name)
        progress = self._progress = reports / f"replica_{variables['ACCELERATE_FT_REPLICA']}"
        self._enter(reports / f".{progress.name}.{variables['RANK']}")
        if variables["RANK"] == "0":
            progress.unlink(missing_ok=True)
        self._show(elsewhere)
        own = {"ACCELERATE_FT_DIRECTORY": str(reports)}
        if entrance is not None:
            self._tunnel = TunnelClient(entrance, variables[run_token.VARIABLE].encode())
            own |= {"TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{self._tunnel.port}"}
            own |= {"ACCELERATE_FT_HOST": self.place().address}
        return self.start(entrypoint, directory, {**variables, **own}, entrance is None), [progress, self._here]

    def _enter(self, here: Path) -> None:
        """Make the directory of reports, which the last actor of this node removes."""
        self._here = here
        while not here.exists():
            here.parent.mkdir(mode=0o700, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):  # another one has just removed it
                here.touch()

    def look(self, seconds: float, elsewhere: Mapping[str, str]) -> ReplicaAnswer:
        """Return what has happened since the last call.

        Args:
            seconds: how long to wait for output, a report or the end.
            elsewhere: the reports of replicas on other nodes, by name of their files. The replicas of this node read
                them, so that one that was restarted does not begin a run of its own.
        """
        self._show(elsewhere)
        deadline, former = time.monotonic() + seconds, self._report
        while self._output.empty() and self._end is None and time.monotonic() < deadline and self._read() == former:
            time.sleep(_LOOK_SECONDS)
        answer = self.read(0)
        text, moment = self._read()
        if answer.end is not None and self._progress is not None:
            self._show({})
            self._progress.unlink(missing_ok=True)
            self._here.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # others are there
                self._progress.parent.rmdir()
        return ReplicaAnswer(answer, text, moment, self._is_stopped())

    def _show(self, elsewhere: Mapping[str, str]) -> None:
        """Show the reports of other nodes next to those of this one."""
        assert self._progress is not None
        self._elsewhere.show(self._progress.parent, elsewhere)

    def _read(self) -> tuple[str, int]:
        """Return the last report, and when it was written. What was there before the process ended is kept."""
        if self._progress is not None:
            with contextlib.suppress(OSError):  # none yet, or another process of the replica has removed it
                moment = self._progress.stat().st_mtime_ns
                self._report = self._progress.read_text(encoding="utf-8"), moment
        return self._report

    def _is_stopped(self) -> bool:
        if self._child is not None:
            with contextlib.suppress(psutil.Error):  # it has ended
                return psutil.Process(self._child.pid).status() == psutil.STATUS_STOPPED
        return False

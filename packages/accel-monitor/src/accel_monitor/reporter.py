"""The thread that writes what a recorder has counted. It never disturbs the training loop."""

from __future__ import annotations

import atexit
import contextlib
import logging
import math
import os
import socket
import statistics
import threading
import time
from collections import deque
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import torch

from accel_state import devices, processes, rank_ends
from accel_state.errors import ConfigurationError
from accel_state.paths import make_directory, open_for_writing
from accel_state.preemption import launcher_directory

from . import process
from .bad_steps import BadSteps
from .live import remove_live, share
from .parts import NAMES, STEP_PARTS
from .recorder import RECENT_STEPS, Recorder
from .records import FOLDER, bad_step_sentence, encode, encode_now, file_name, read_attempts
from .stragglers import REPORTED_STEPS, OwnParts, Watch, encode_recent
from .values import is_known, number

# Not that of accel_state, which needs a PartialState: scripts without an Accelerator may have none.
logger: Final = logging.getLogger(__name__)

# Lines are appended at first after this many intervals, later when the run has grown by this share: a run of a month
# has some thousand lines per rank.
_INTERVALS = 5
_GROWTH = 0.002
# Several reports in the steps in which a slow rank is to be found, also where a step takes a few milliseconds.
_STEPS_A_REPORT = 6
_FASTEST_SECONDS = 0.05
_ADD_UP_SECONDS = 0.25
"""Seconds between two times at which the counters are added up, at most; a single process reports no faster."""
# A shared directory takes about this long for each file that rank 0 reads.
_SECONDS_A_RANK = 0.002
# How long the end of the process waits for its last line, if the file system does not answer.
_LAST_LINE_SECONDS = 5.0


class Reporter:
    """Writes the counters of one process every few seconds.

    Errors of the file system are reported once as a warning, and writing is tried again: counters are cumulative, so
    a later line contains what is missing.

    Args:
        recorder: what to report.
        project_dir: the directory of the run.
        interval: seconds between two reports.
        identity: the fields of the first line: replica, rank, world_size, device.
        started_with: a process that started this one for the run, such as the launcher; its start counts as the start.
        device: whose memory is reported.
    """

    def __init__(
        self,
        recorder: Recorder,
        project_dir: Path,
        interval: float,
        identity: dict[str, Any],
        started_with: int | None,
        device: torch.device,
    ) -> None:
        self._device = device
        self.recorder: Recorder = recorder
        self.interval: float = interval
        self._name = file_name(identity["replica"], identity["rank"])
        self._folder = project_dir / FOLDER
        self._started_with = started_with
        self._launch_above = rank_ends.launch()
        self._identity = {"host": socket.gethostname(), "device": identity["device"]}
        self._world_size = identity["world_size"]
        self._bad_steps = BadSteps(recorder)
        self._watch: Watch | None = None
        if identity["rank"] == 0 and self._world_size > 1:
            self._watch = Watch(self._folder, identity["replica"], self._world_size)
        self.own_parts: OwnParts = OwnParts.DATA
        """Which parts of a step are known to be this rank's own, without waiting for others."""
        self.memory: int | None = None
        """Bytes in use at the latest report; None if unknown."""
        self._queued: tuple[int, float] | None = None  # of the last report with another step, with that step
        # Between such reports: the last step, and mean seconds of a step.
        self._queued_means: deque[tuple[int, float]] = deque(maxlen=REPORTED_STEPS)
        self._pause = interval if self._world_size == 1 else min(interval, _ADD_UP_SECONDS)
        self._thread_id = threading.get_native_id()
        self._pid = os.getpid()
        self._id = f"{self._pid:x}-{time.time_ns():x}"
        now = time.time()
        self._start = {
            "kind": "start",
            "id": self._id,
            "format": 1,
            **identity,
            "host": self._identity["host"],
            "pid": self._pid,
            "parts": NAMES,
            "time": now - (time.perf_counter() - recorder.start),
            "process_start": processes.start_time(self._pid) or now,
            "launch": self._launch(identity["replica"]),
            "interval": interval,
        }
        file = (self._folder / f"{self._name}.jsonl").absolute()  # the script may change its working directory
        self._own_file = rank_ends.RankFile(os.fspath(file), self._id, self._start["time"])
        self._events: list[dict[str, Any]] = []
        self._lock = threading.Lock()
        self._finished = False
        self._stop, self._wake = False, threading.Event()
        self._warned = False
        self._line_due = 0.0
        self._now: int | None = None
        self._started = False
        try:
            self._start["live"] = share(recorder)
        except OSError as error:
            logger.warning(
                f"the monitor has no shared memory ({error}): steps between the last report and a kill are lost"
            )
        self._thread = threading.Thread(target=self._run, name="accel-monitor", daemon=True)

    def _launch(self, replica: int | None) -> str | None:
        """Return what started this process, and starts it again in the same launch; None if that is not known."""
        if self._launch_above is not None:
            return self._launch_above.name
        launcher = process.agent() if self._started_with is None else self._started_with
        if launcher is None and self._world_size == 1:
            launcher = self._pid  # nothing starts it again
        # A replica that is started again gets another agent.
        if launcher is None or replica is not None:
            return None
        found = processes.identity(launcher)
        return None if found is None else f"{self._identity['host']}-{found}"

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def event(self, kind: str, **fields: Any) -> None:
        """Write a line soon; called by the loop."""
        recorder = self.recorder
        line = {"kind": kind, "id": self._id, "at": round(time.perf_counter() - recorder.start, 6), **fields}
        with self._lock:
            self._events.append(line)
        self._wake.set()

    def finish(self, finished: bool) -> None:
        """Write the last line, and stop. It waits a few seconds at most."""
        if os.getpid() != self._pid or self._stop:
            return
        self._finished, self._stop = finished, True
        self._wake.set()
        self._thread.join(_LAST_LINE_SECONDS)
        # Without the reporter, which holds the models: what the script does after the last line ends with the process.
        atexit.register(_append_exit, self._own_file, self._pid)

    @property
    def slow_rank(self) -> int | None:
        """On rank 0: the rank that the others wait for; None if there is none."""
        named = None if self._watch is None else self._watch.named
        return None if named is None else named.rank

    # -- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            stop = self._stop
            try:
                self._report(stop)
            except (OSError, ConfigurationError) as error:
                if not self._warned:
                    self._warned = True
                    reason = getattr(error, "strerror", None) or error
                    logger.warning(
                        f"the monitor cannot write to {self._folder}: {reason}. Training continues, and the monitor "
                        "tries again."
                    )
            if stop:
                return
            due = time.monotonic() + self._pause
            while (rest := due - time.monotonic()) > 0 and not self._wake.wait(min(rest, _ADD_UP_SECONDS)):
                self.recorder.add_up()  # what is added up survives a kill
            self._wake.clear()

    def _report(self, stop: bool) -> None:
        if not self._started:
            self._begin()
        line = {"kind": "sample", "id": self._id, **self._counters()}
        assert self._now is not None
        os.pwrite(self._now, encode_now({**line, **self._recent(line)}), 0)
        self._compare(line["step"])
        self._look_for_bad_steps()
        self.recorder.forget(REPORTED_STEPS)
        with self._lock:
            events, self._events = self._events, []
        lines = [*events]
        if stop:
            lines.append({**line, "kind": "end", "finished": self._finished})
        elif events or line["at"] >= self._line_due:
            lines.append(line)
            self._line_due = line["at"] + max(_INTERVALS * self.interval, _GROWTH * line["at"])
        try:
            if lines:
                self._append(b"".join(map(encode, lines)))
        except OSError:
            with self._lock:
                self._events = events + self._events
            self._line_due = 0.0
            raise
        if stop:
            os.close(self._now)
            remove_live(self._start.get("live") or "")

    def _recent(self, line: dict[str, Any]) -> dict[str, Any]:
        """Return the latest steps, for rank 0 to compare, if there are other ranks.

        Sets the pause to the next report.
        """
        records = self.recorder.latest(REPORTED_STEPS)
        if not records:
            return {}
        last = records[-1]
        # Without the start-up that the first step contains.
        mean = statistics.fmean(sum(record.seconds[part] for part in STEP_PARTS) for record in records)
        # Before the steps to look through are forgotten.
        pause = max(_ADD_UP_SECONDS, RECENT_STEPS / 2 * mean)
        if self._world_size > 1:
            # Rank 0 reads the reports of all ranks.
            pause = max(_FASTEST_SECONDS, _STEPS_A_REPORT * mean, _SECONDS_A_RANK * self._world_size)
        self._pause = min(self.interval, pause)
        if self._world_size == 1:
            return {}
        self._note_queued(last.step, line["queued"] or 0.0)
        if self.own_parts is OwnParts.DEVICE:
            records = [record for record in records if record.on_device]  # all but the first steps
        if not records:
            return {}
        queued = [self._mean_queued(record.step) for record in records]
        return {**self._identity, "recent": encode_recent(records, self.own_parts, queued)}

    def _note_queued(self, step: int, queued: float) -> None:
        before = self._queued
        if before is not None and step < before[0]:  # a state was loaded
            self._queued_means.clear()
            before = None
        if before is None or step > before[0]:
            self._queued = (step, queued)
            mean = 0.0 if before is None else (queued - before[1]) / (step - before[0])
            self._queued_means.append((step, mean))

    def _mean_queued(self, step: int) -> float:
        return next((mean for last, mean in self._queued_means if step <= last), 0.0)

    def _look_for_bad_steps(self) -> None:
        for found in self._bad_steps.check():
            # All ranks have the same norm; the batch of each may be the reason.
            if found["what"] == "loss" or self._start["rank"] == 0:
                logger.warning(bad_step_sentence(found, self._start["rank"]))
            self.event("bad_step", **found)

    def _compare(self, step: int) -> None:
        """On rank 0: name a rank that the others wait for."""
        if self._watch is None:
            return
        before = self._watch.named
        found = self._watch.check()
        if found is not None:
            logger.warning(found.sentence())
            self.event("straggler", **asdict(found))
        elif before is not None and self._watch.named is None:
            logger.warning(f"rank {before.rank} no longer makes the other ranks wait.")
            self.event("recovered", rank=before.rank, step=step)

    def _begin(self) -> None:
        make_directory(self._folder)
        previous = self._close_previous()
        start = dict(self._start)
        began = None if self._launch_above is None else self._launch_above.began
        if self._launch_above is None and self._started_with is not None:
            began = processes.start_time(self._started_with)
        # The launcher of a restarted process has been running through the attempts before.
        if began is not None and (previous is None or began > previous):
            start["launcher_start"] = min(began, start["process_start"])
        self._append(encode(start))
        directory = launcher_directory()
        if self._started_with is not None and directory is not None:
            rank_ends.write_note(directory, self._own_file)
        if self._launch_above is not None:
            self._launch_above.write_note(self._own_file)
        self._now = open_for_writing(self._folder / f"{self._name}.now")
        self._started = True

    def _close_previous(self) -> float | None:
        """Append the last counters of the process before, if it was killed. Returns when it was last alive."""
        file = self._folder / f"{self._name}.jsonl"
        if not file.exists():
            return None
        attempts = read_attempts(file)
        if not attempts:
            return None
        last = attempts[-1]
        if last.finished is None and not last.running and last.start["host"] == socket.gethostname():
            if last.samples:
                # It may be from memory that is removed here, or from the file that is overwritten next.
                sample, names = last.samples[-1], ("at", "parts", "step", "step_at", "samples", "tokens")
                counts = {name: getattr(sample, name) for name in names}
                self._append(encode({"kind": "sample", "id": last.start["id"], **counts}))
            remove_live(last.start.get("live") or "")
        return last.end

    def _append(self, content: bytes) -> None:
        rank_ends.append(self._folder / f"{self._name}.jsonl", content)

    def _counters(self) -> dict[str, Any]:
        snapshot = self.recorder.snapshot()
        ran, queued = process.scheduled(self._thread_id) or (None, None)
        device = devices.of(self._device)
        self.memory = memory = None if device is None else device.memory_allocated(self._device.index or 0)
        return {
            "at": round(snapshot.elapsed, 6),
            "parts": [round(seconds, 6) for seconds in snapshot.seconds],
            "part": NAMES[snapshot.part],
            "step": snapshot.step,
            "step_at": None if snapshot.step_at is None else round(snapshot.step_at, 6),
            "samples": snapshot.samples,
            "tokens": snapshot.tokens,
            "loss": self._latest_loss(),
            "memory": memory,
            "ran": ran,
            "queued": queued,
        }

    def _latest_loss(self) -> float | str | None:
        """Return the latest loss that is known; values that JSON has no number for as text."""
        loss = self.recorder.loss
        value = number(loss) if is_known(loss) else self._bad_steps.loss
        return value if value is None or math.isfinite(value) else str(value)


def _append_exit(file: rank_ends.RankFile, pid: int) -> None:
    """Append when this process ends, unless it is a fork of the one that was measured."""
    if os.getpid() == pid and os.path.exists(file.path):
        with contextlib.suppress(OSError, ConfigurationError):
            file.append_end("exit", time.time())

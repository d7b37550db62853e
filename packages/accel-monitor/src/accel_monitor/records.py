"""The files of a monitored run, and how they are read. Torch-free.

Each rank has two files in ``<project directory>/monitor``. ``rank-00003.jsonl`` is only appended to: a line when a
process starts, one from time to time and at its events, and one at its end. ``rank-00003.now`` holds the latest
counters and is overwritten every few seconds. Ranks of replica groups have names with the replica,
``replica-1-rank-00003``.

Counters in a line count from the start of its process, so a line that is lost or damaged costs no more than detail.
"""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from accel_state.errors import ConfigurationError
from accel_state.processes import start_time

from .live import read_live
from .parts import NAMES, Part

FOLDER = "monitor"
_FILE = re.compile(r"(?:replica-(\d+)-)?rank-(\d+)\.jsonl")
_NOW_BYTES = 2048
_CLOCK_TOLERANCE = 30.0


def file_name(replica: int | None, rank: int) -> str:
    """Name of a rank's file, without ``.jsonl`` or ``.now``."""
    return f"rank-{rank:05d}" if replica is None else f"replica-{replica}-rank-{rank:05d}"


def encode(line: dict[str, Any]) -> bytes:
    """Return a line of a ``.jsonl`` file."""
    return json.dumps(line, separators=(",", ":")).encode() + b"\n"


def encode_now(line: dict[str, Any]) -> bytes:
    """Return the content of a ``.now`` file, always of the same length, so that writing it replaces all of it."""
    return encode(line).rstrip(b"\n").ljust(_NOW_BYTES - 1) + b"\n"


@dataclass(frozen=True)
class Sample:
    """The counters of a process at one moment, from its start.

    Attributes:
        at: seconds since the recorder was made.
        parts: seconds by part, in the order of :class:`Part`.
        step: optimizer steps, including those of a loaded checkpoint.
        samples: samples for training.
        tokens: tokens for training; 0 if unknown.
        step_at: when the latest step ended, as ``at``; None before the first.
        part: what the process was doing; None in a record of a killed process.
        loss: the latest loss; None if unknown.
        memory: bytes in use on the device (of the process, on the CPU); None if unknown.
        ran: CPU seconds of the loop's thread; None if unknown.
        queued: seconds in which that thread could run but had no core; None if unknown.
    """

    at: float
    parts: tuple[float, ...]
    step: int
    samples: int = 0
    tokens: int = 0
    step_at: float | None = None
    part: Part | None = None
    loss: float | str | None = None
    memory: int | None = None
    ran: float | None = None
    queued: float | None = None


@dataclass(frozen=True)
class Load:
    """A state that was loaded: seconds since the start, its optimizer steps, and those of the process before it."""

    at: float
    step: int
    before: int


@dataclass
class SlowRank:
    """A rank that the others waited for, from its first to its last slow step."""

    rank: int
    part: str
    seconds: float
    first: int
    last: float = float("inf")


@dataclass
class Attempt:
    """One process of a run: from its start to its end.

    Attributes:
        start: the first line of the process: host, pid, rank, world size, device, and times.
        samples: in the order of time.
        loads: the states that it loaded.
        saves: seconds that each saved state took.
        finished: True if the script reported that the run is complete, False if the process ended without that, None if
            it was killed or runs.
        running: whether the process exists still, if that can be known here; else None.
    """

    start: dict[str, Any]
    samples: list[Sample] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    saves: list[float] = field(default_factory=list)
    stragglers: list[SlowRank] = field(default_factory=list)
    """Ranks that others waited for, as rank 0 found them."""
    bad_steps: list[dict[str, Any]] = field(default_factory=list)
    """Losses and gradient norms that are not finite, or far too large; see :mod:`accel_monitor.bad_steps`."""
    step_flops: int | None = None
    """Floating-point operations of a step; None before they are counted."""
    recomputed_flops: int = 0
    """Those that a step computes again, which are not in ``step_flops``."""
    peak_flops: float | None = None
    """Operations a second that the device can compute; None if unknown."""
    finished: bool | None = None
    running: bool | None = None
    notes: list[str] = field(default_factory=list)
    """What a reader of its numbers should know."""
    written: float | None = None
    """When the latest counters were written, by the clock of the rank's host."""
    exited: float | None = None
    """When the process exited, in seconds since the epoch; None if unknown. The launcher reports the exit of the last
    rank of its machine."""
    launcher_exited: float | None = None
    """When its launcher exited; None if unknown."""

    @property
    def slot(self) -> tuple[int, int]:
        """Replica and rank."""
        return self.start["replica"] or 0, self.start["rank"]

    @property
    def begin(self) -> float:
        """When the process was started, or the launcher that starts with it, in seconds since the epoch."""
        return float(self.start.get("launcher_start", self.start["process_start"]))

    @property
    def launch(self) -> str | None:
        """The launcher that started the process, on its machine; None if it is not known."""
        return self.start.get("launch")

    @property
    def end(self) -> float:
        """The moment of the last counters, in seconds since the epoch."""
        return float(self.start["time"]) + (self.samples[-1].at if self.samples else 0.0)

    @property
    def gone(self) -> float:
        """The last moment that is known of the process and its launcher, in seconds since the epoch."""
        return max(self.end, self.exited or 0.0, self.launcher_exited or 0.0)

    @property
    def first_step(self) -> int:
        """The steps that were complete when its first step began."""
        return self.loads[-1].step if self.loads else int(self.start.get("step", 0))

    @property
    def last_step(self) -> int:
        """The steps that were complete at its end."""
        return self.samples[-1].step if self.samples else self.first_step


@dataclass
class Run:
    """A run over all of its attempts.

    Attributes:
        directory: the directory of the files.
        attempts: by replica and rank, each in the order of time.
        notes: what is wrong with the files, as sentences.
    """

    directory: Path
    attempts: dict[tuple[int, int], list[Attempt]]
    notes: list[str] = field(default_factory=list)

    @property
    def begin(self) -> float:
        """The first start of a process, in seconds since the epoch."""
        return min(attempts[0].begin for attempts in self.attempts.values())

    @property
    def end(self) -> float:
        """The exit of the last process or launcher that is known, in seconds since the epoch."""
        return max(attempts[-1].gone for attempts in self.attempts.values())


def bad_step_sentence(event: dict[str, Any], rank: int) -> str:
    """Return what a person should know of a bad step."""
    name = "loss" if event["what"] == "loss" else "gradient norm"
    text = f"step {event['step']}, rank {rank}: the {name} is {event['value']}"
    if event["median"] is not None:
        text += f", and the median of the steps before is {event['median']:.4g}"
    if event["group"] is not None:
        text += f"; parameter group {event['group']}"
    indices = event["indices"]
    if indices:
        text += f"; its batch had the samples {_first_of(indices)} (`accel monitor show-batch` reads them again)"
    return text + "."


def find_folder(directory: Path) -> Path:
    """Return the directory of the files of a run.

    Raises:
        ConfigurationError: there are none.
    """
    for folder in (directory / FOLDER, directory):
        if folder.is_dir() and any(_FILE.fullmatch(entry.name) for entry in folder.iterdir()):
            return folder
    problem = "holds no monitored run" if directory.is_dir() else "is not a directory"
    raise ConfigurationError(
        f"{directory} {problem}. Give the project directory of a run that was started with `accel launch --monitor` or "
        f"Accelerator(monitor=True); its files are in {FOLDER}/ there."
    )


def read_runs(directory: str | Path) -> list[Run]:
    """Read the runs of a project directory, oldest first.

    A process that begins without loading a state begins a new run, if one of the same rank completed its run before it,
    or if all ranks are started by another launcher.

    Raises:
        ConfigurationError: there are none.
    """
    folder = find_folder(Path(directory))
    notes: list[str] = []
    by_slot: dict[tuple[int, int], list[Attempt]] = {}
    for file in sorted(folder.iterdir()):
        if _FILE.fullmatch(file.name):
            for attempt in read_attempts(file, notes):
                by_slot.setdefault(attempt.slot, []).append(attempt)
    if not by_slot:
        raise ConfigurationError(
            f"{folder} holds files of a monitored run, but no process has written a complete first line. "
            + " ".join(notes)
        )
    runs = _split(folder, by_slot)
    for run in runs:
        of_attempts = [text for attempts in run.attempts.values() for one in attempts for text in one.notes]
        run.notes = [*notes, *_overlaps(run), *_missing(run), *_clocks(run), *dict.fromkeys(of_attempts)]
    return runs


def chosen_run(directory: Path, number: int | None) -> Run:
    """Return the run of a directory that a reader asks for, with a note if there are others.

    Raises:
        ConfigurationError: there is none, or not this one.
    """
    runs = read_runs(directory)
    if number is not None and not 1 <= number <= len(runs):
        raise ConfigurationError(
            f"--run {number}: {directory} holds {len(runs)} run(s). Give a number from 1 to {len(runs)}."
        )
    run = runs[-1 if number is None else number - 1]
    if len(runs) > 1:
        shown = len(runs) if number is None else number
        run.notes.insert(0, f"{directory} holds {len(runs)} runs, and this is run {shown}; --run N shows another.")
    return run


def read_attempts(file: Path, notes: list[str] | None = None) -> list[Attempt]:
    """Return the processes that wrote a file, in the order of their starts; ``notes`` gets what is wrong with it."""
    attempts: dict[str, Attempt] = {}
    damaged = 0
    with file.open("rb") as lines:
        for raw in lines:
            line = _parse(raw)
            if line is None:
                damaged += 1
            elif line["kind"] == "start":
                attempts[line["id"]] = Attempt(line, written=line["time"])
            elif line["id"] in attempts:
                _add(attempts[line["id"]], line)
    if damaged and notes is not None:
        notes.append(f"{file.name}: {damaged} line(s) could not be read and were left out.")
    found = sorted(attempts.values(), key=lambda attempt: attempt.begin)
    for attempt in found:
        if attempt.finished is None:
            _add_latest(attempt, file)
    return found


def _parse(raw: bytes) -> dict[str, Any] | None:
    try:
        line = json.loads(raw)
        if line["kind"] == "start":
            return line if isinstance(line["rank"], int) and float(line["time"]) >= 0 and line["id"] else None
        return line if float(line["at"]) >= 0 and line["id"] else None
    except (ValueError, KeyError, TypeError):
        return None


def _add(attempt: Attempt, line: dict[str, Any]) -> None:
    sample = to_sample(line)
    if sample is not None and (not attempt.samples or sample.at >= attempt.samples[-1].at):
        attempt.samples.append(sample)
        attempt.written = attempt.start["time"] + sample.at
    if line["kind"] == "load":
        attempt.loads.append(Load(line["at"], line["step"], line["before"]))
    elif line["kind"] == "save":
        attempt.saves.append(line["seconds"])
    elif line["kind"] == "straggler":
        attempt.stragglers.append(SlowRank(line["rank"], line["part"], line["seconds"], line["first"]))
    elif line["kind"] == "recovered" and attempt.stragglers:
        attempt.stragglers[-1].last = line["step"]
    elif line["kind"] == "flops":
        attempt.step_flops, attempt.recomputed_flops = line["operations"], line["recomputed"]
        attempt.peak_flops = line["peak"]
    elif line["kind"] == "bad_step":
        attempt.bad_steps.append(line)
    elif line["kind"] == "note":
        attempt.notes.append(str(line["text"]))
    elif line["kind"] == "end":
        attempt.finished = bool(line.get("finished"))
    elif line["kind"] == "exit":
        attempt.exited = attempt.start["time"] + line["at"]
    elif line["kind"] == "launcher":
        attempt.launcher_exited = attempt.start["time"] + line["at"]


def to_sample(line: dict[str, Any]) -> Sample | None:
    """Return the counters of a line; None if it has none."""
    parts = line.get("parts")
    if not isinstance(parts, list) or len(parts) != len(NAMES):
        return None
    part = line.get("part")
    names = ("step_at", "loss", "memory", "ran", "queued")
    return Sample(
        at=float(line["at"]),
        parts=tuple(parts),
        step=int(line["step"]),
        samples=int(line.get("samples", 0)),
        tokens=int(line.get("tokens", 0)),
        part=Part(NAMES.index(part)) if part in NAMES else None,
        **{name: line.get(name) for name in names},
    )


def read_now(file: Path) -> dict[str, Any] | None:
    """Return the content of a ``.now`` file; None if it is missing or is being written."""
    try:
        return _parse(file.read_bytes())
    except OSError:
        return None


def _add_latest(attempt: Attempt, file: Path) -> None:
    """Add the counters that are not in the file yet: of a process that runs, or of one that was killed."""
    now = read_now(file.with_suffix(".now"))
    if now is not None and now["id"] == attempt.start["id"]:
        _add(attempt, now)
    if attempt.start["host"] != socket.gethostname():
        return
    started = start_time(attempt.start["pid"])
    # Process ids are used again.
    attempt.running = started is not None and started <= attempt.start["time"]
    live, last = read_live(attempt.start.get("live") or ""), attempt.samples[-1] if attempt.samples else None
    if live is None:
        return
    if last is not None and live["at"] < last.at and live["step"] > last.step:
        # The loop itself counts the steps there; its seconds are older than those of the latest report.
        live |= {"at": last.at, "parts": list(last.parts), "samples": max(last.samples, live["samples"])}
    _add(attempt, {"kind": "sample", "id": attempt.start["id"], **live})


def _split(folder: Path, by_slot: dict[tuple[int, int], list[Attempt]]) -> list[Run]:
    """Divide the attempts of each slot into runs, at the moments at which some slot begins a new one."""
    begins = []
    launches = Launches(attempt for attempts in by_slot.values() for attempt in attempts)
    for attempts in by_slot.values():
        for earlier, later in pairwise(attempts):
            if later.loads or later.begin <= earlier.end:
                continue
            if earlier.finished or (later.first_step == 0 and launches.changed(earlier, later)):
                begins.append((earlier.end, later.begin))
    cuts: list[float] = []
    for earlier_end, later_begin in sorted(begins):
        # All ranks of a run begin it between the end of the last run and the first later start.
        if not cuts or earlier_end > cuts[-1]:
            cuts.append(later_begin)
        else:
            cuts[-1] = min(cuts[-1], later_begin)
    edges = [float("-inf"), *cuts, float("inf")]
    runs = []
    for low, high in pairwise(edges):
        chosen = {slot: [a for a in attempts if low <= a.begin < high] for slot, attempts in by_slot.items()}
        chosen = {slot: attempts for slot, attempts in chosen.items() if attempts}
        if chosen:
            runs.append(Run(folder, chosen))
    return runs


class Launches:
    """When the launchers of a directory's processes ran.

    Args:
        attempts: the processes.
    """

    def __init__(self, attempts: Iterable[Attempt]) -> None:
        spans: dict[str | None, tuple[float, float]] = {}
        for attempt in attempts:
            begin, end = spans.get(attempt.launch, (attempt.begin, attempt.gone))
            spans[attempt.launch] = min(begin, attempt.begin), max(end, attempt.gone)
        self._is_known = None not in spans
        self._spans = list(spans.values())

    def changed(self, earlier: Attempt, later: Attempt) -> bool:
        """Return True if no launcher, on any machine, ran from the end of a process to the start of a later one."""
        return self._is_known and not any(begin <= earlier.end and end >= later.begin for begin, end in self._spans)


def _overlaps(run: Run) -> Iterator[str]:
    for (_, rank), attempts in run.attempts.items():
        for earlier, later in pairwise(attempts):
            if later.begin < earlier.end - _CLOCK_TOLERANCE:
                yield (
                    f"two processes of rank {rank} wrote at the same time (pid {earlier.start['pid']} on "
                    f"{earlier.start['host']} and pid {later.start['pid']} on {later.start['host']}): two runs share "
                    f"{run.directory}. Give each its own project directory."
                )
                return


def _missing(run: Run) -> Iterator[str]:
    newest = max((attempts[-1] for attempts in run.attempts.values()), key=lambda attempt: attempt.begin)
    replica, world_size = newest.slot[0], newest.start["world_size"]
    ranks = {slot[1] for slot in run.attempts if slot[0] == replica}
    absent = sorted(set(range(world_size)) - ranks)
    if absent:
        yield f"{len(absent)} of {world_size} ranks have not reported: {_first_of(absent)}."


def _first_of(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")


def _clocks(run: Run) -> Iterator[str]:
    """Hosts whose processes seem to have started at other times, although ranks of one attempt start together."""
    firsts: dict[str, float] = {}
    for attempts in run.attempts.values():
        host, begin = attempts[0].start["host"], attempts[0].begin
        firsts[host] = min(firsts.get(host, begin), begin)
    if len(firsts) > 1:
        early, late = min(firsts, key=firsts.__getitem__), max(firsts, key=firsts.__getitem__)
        if firsts[late] - firsts[early] > _CLOCK_TOLERANCE:
            yield (
                f"the first processes of {late} started {firsts[late] - firsts[early]:.0f} s after those of {early}: "
                "either they did, or the clocks of these machines differ. Durations are not affected."
            )

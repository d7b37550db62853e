"""Kill replicas of a fault-tolerant run again and again, and check that no step and no sample was lost.

    python benchmarks/kill_replicas.py --results kills.jsonl                 4 replicas, 2,000 steps, 200 kills
    python benchmarks/kill_replicas.py --results kills.jsonl --spares 1 --first 40
    python benchmarks/kill_replicas.py --results kills.jsonl --restarts --first 20
    python benchmarks/kill_replicas.py --results kills.jsonl --overhead
    python benchmarks/kill_replicas.py --monitor --first 30                  and with --restarts --monitor --first 30

Each prints a table of all results in the file. The schedule of kills (SIGKILL or SIGSTOP, which replica, after which
step, how long after) follows from --seed, which is printed; --first N is the run up to its first N kills. --restarts
runs the same schedule with --max_restarts, where all processes continue from a state. --overhead compares steps
without kills with those of DDP, in five interleaved rounds. --monitor also checks the ledger of accel-monitor: every
second of a process belongs to one cause, the steps that it counts as computed again are those in these files, and the
seconds of each rank are those from the start of the launcher to its exit.

Each replica writes the samples and the loss of every share that it computes. A checker joins these files; it compares
them with the order that plain PyTorch draws, and the final weights with those of a run without kills. Steps last
--pause seconds while a replica is being restarted, and go on without a pause from a kill to the next committed step.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import torch
from replica_script import SEED, Settings

from accel_monitor import Run, make_ledger, read_runs
from accel_monitor.report import report

SCRIPT = Path(__file__).with_name("replica_script.py")
STOP_LIMIT = 2.0  # --replica_timeout
SAVE_EVERY = 20  # steps, with --restarts
MOST_DELAY = 0.4  # seconds between a committed step and a kill; steps last longer, so kills hit all parts of one
OVERDUE_PAUSE = 3.0  # length of steps while a kill waits for a replica that could be killed


@dataclass
class Kill:
    """One planned kill, and what was seen of it."""

    after: int  # committed steps
    replica: int
    number: int  # the signal
    delay: float  # seconds
    at: float = math.inf  # when
    before: int = 0  # the latest committed step then
    recovered: float | None = None  # seconds until the next one


@dataclass
class Life:
    """What one process has written."""

    path: Path
    offset: int = 0
    pid: int = 0
    joined: bool = False
    ended: bool = False

    @property
    def replica(self) -> str:
        return self.path.name.partition(".")[0]

    def read(self) -> list[list[Any]]:
        """The new lines."""
        with self.path.open("rb") as file:
            file.seek(self.offset)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self.offset += len(whole)
        new = [json.loads(line) for line in whole.splitlines()]
        for event in new:
            if event[0] == "start":
                self.pid = event[1]
            self.joined = self.joined or event[0] == "done"
        return new

    def runs(self) -> bool:
        """Whether the process trains: it was neither killed nor stopped."""
        try:
            process = psutil.Process(self.pid)
            if str(SCRIPT) not in process.cmdline():  # another process has the number now
                return False
            return process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_STOPPED)
        except psutil.Error:
            return False


class Watch:
    """Follows the files of a run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lives: dict[Path, Life] = {}
        self.times: dict[int, float] = {}  # when each step was committed first
        self.committed = -1

    def look(self) -> None:
        for path in self.folder.glob("*.jsonl"):
            self.lives.setdefault(path, Life(path))
        for life in self.lives.values():
            if life.ended:
                continue
            life.ended = life.joined and not life.runs()  # a process that is stopped writes nothing, too
            for event in life.read():
                if event[0] == "done":
                    self.committed = max(self.committed, event[1])
                    self.times[event[1]] = min(event[-1], self.times.get(event[1], math.inf))

    def alive(self) -> dict[str, Life]:
        """The process of each replica that trains."""
        return {life.replica: life for life in self.lives.values() if life.joined and not life.ended and life.runs()}


def schedule(arguments: argparse.Namespace) -> list[Kill]:
    """Kills at different steps, in their order."""
    draw = random.Random(arguments.seed)
    steps = sorted(draw.sample(range(5, arguments.steps - 5), arguments.kills))
    replicas = arguments.replicas + arguments.spares
    numbers = (signal.SIGKILL, signal.SIGSTOP)
    kills = [Kill(step, draw.randrange(replicas), draw.choice(numbers), draw.random() * MOST_DELAY) for step in steps]
    return kills[: arguments.first]


def command(settings: Settings, launch: Sequence[str]) -> list[str]:
    launcher = [sys.executable, "-m", "accel_launch", "launch", "--cpu", "--num_cpu_threads_per_process", "1"]
    return [*launcher, *launch, str(SCRIPT), json.dumps(asdict(settings))]


def ft_options(replicas: int, spares: int) -> list[str]:
    counts = ["--num_replicas", str(replicas), "--num_spares", str(spares)]
    return ["--ft", *counts, "--replica_timeout", str(STOP_LIMIT)]


@dataclass
class Booked:
    """What the ledger says, and what the files of the processes say."""

    again: dict[str, tuple[int, int]]  # steps computed again, by replica or rank: in the ledger, and in the files
    difference: float  # between the seconds of all causes and the time from first to last report, as a share
    seconds: dict[str, tuple[int, float]]  # processes, and seconds of all causes, by replica or rank
    report: list[str]  # that of `accel goodput`

    def is_right(self) -> bool:
        return self.difference <= 0.01 and all(ledger == files for ledger, files in self.again.values())

    def print_sums(self, seconds: float) -> bool:
        """Print the seconds of each rank beside those of the launcher; whether they differ by at most 1%.

        Args:
            seconds: from the start of the launcher to its exit, as the process that started it measures them.
        """
        print("\n".join([*self.report, ""]))
        print("| rank | processes | seconds of all causes | launcher, start to exit | difference |")
        print("| ---: | ---: | ---: | ---: | ---: |")
        for name, (processes, known) in sorted(self.seconds.items()):
            print(f"| {name} | {processes} | {known:.2f} s | {seconds:.2f} s | {known / seconds - 1:+.2%} |")
        print()
        return all(abs(known / seconds - 1) <= 0.01 for _, known in self.seconds.values())


def booked(folder: Path, restarts_all: bool) -> Booked:
    """Compare the ledger of a run with the files of its processes."""
    done: dict[str, Counter[int]] = defaultdict(Counter)
    for path in folder.glob("*.jsonl"):
        for line in path.read_text().splitlines():
            event = json.loads(line)
            if event[0] == "done":
                done[path.name.partition(".")[0]][event[1]] += 1
    (run,) = read_runs(folder / "states")
    again = {}
    for slot, attempts in run.attempts.items():
        name = str(slot[1] if restarts_all else slot[0])
        alone = make_ledger(Run(run.directory, {slot: attempts}))
        again[name] = alone.repeated_steps, done[name].total() - len(done[name])
    ledger = make_ledger(run)
    lives = [of_slot[-1].end - of_slot[0].begin for of_slot in ledger.entries.values()]
    seconds = {}
    for slot, of_slot in ledger.entries.items():
        known = sum(sum(entry.seconds.values()) for entry in of_slot)
        seconds[str(slot[1] if restarts_all else slot[0])] = len(run.attempts[slot]), known
    return Booked(again, abs(ledger.total / sum(lives) - 1), seconds, list(report(ledger)))


class Harness:
    """One run of a command, with the kills of a schedule."""

    environment: Mapping[str, str] | None = None
    """The variables of the command; None for those of this process."""

    def __init__(self, words: Sequence[str], folder: Path, processes: int, kills: Sequence[Kill], pause: float) -> None:
        self.words, self.folder, self.processes, self.pause = words, folder, processes, pause
        self.kills, self.planned, self.recovering = kills, list(kills), list[Kill]()
        self.stopped: list[tuple[int, float]] = []
        self.watch = Watch(folder)
        self._pace = ""
        self._set_pace(0.0)

    def _set_pace(self, seconds: float) -> None:
        if str(seconds) != self._pace:
            self._pace = str(seconds)
            unfinished = self.folder / "pace.part"
            unfinished.write_text(self._pace)
            unfinished.replace(self.folder / "pace")

    def run(self, restarts_all: bool = False) -> float:
        """Run the command; returns its seconds.

        Args:
            restarts_all: any death ends all processes, and nobody but the harness notices one that is stopped.
        """
        began = time.time()
        with (self.folder / "log").open("wb") as log:
            process = subprocess.Popen(self.words, stdout=log, stderr=log, env=self.environment)
        try:
            while process.poll() is None:
                self._look(restarts_all)
                time.sleep(0.01)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
        self._note_recovered()
        if process.returncode:
            sys.exit(f"the run ended with exit code {process.returncode}:\n{(self.folder / 'log').read_text()[-4000:]}")
        missing = [kill for kill in self.kills if kill.recovered is None]
        if missing:
            sys.exit(f"{len(missing)} kills of the schedule could not be made; give a longer --pause.")
        return time.time() - began

    def _look(self, restarts_all: bool) -> None:
        self._note_recovered()
        self._end_stopped()
        if self.recovering:
            return
        watch, alive = self.watch, self.watch.alive()
        if not self.planned:
            # The last one returns too: one that ends after the others have finished is a failure.
            self._set_pace(self.pause if len(alive) < self.processes else 0.0)
            return
        kill = self.planned[0]
        late = watch.committed - kill.after
        self._set_pace(OVERDUE_PAUSE if late > 5 else self.pause if late >= -2 or len(alive) < self.processes else 0.0)
        if late < 0 or len(alive) < (1 if restarts_all else 2):
            return
        before = watch.committed
        time.sleep(kill.delay)
        watch.look()
        life = alive.get(str(kill.replica)) or sorted(alive.items())[kill.replica % len(alive)][1]
        if watch.committed != before or not life.runs():
            return  # with its delay after another step
        self.planned.pop(0)
        kill.at, kill.before = time.time(), watch.committed
        self.kill(life, kill)
        self._set_pace(0.0)
        self.recovering.append(kill)
        if restarts_all and kill.number == signal.SIGSTOP:
            self.stopped.append((life.pid, kill.at + STOP_LIMIT))

    def kill(self, life: Life, kill: Kill) -> None:
        """Do to a process what was planned."""
        os.kill(life.pid, kill.number)

    def _note_recovered(self) -> None:
        self.watch.look()
        for kill in list(self.recovering):
            later = [at for step, at in self.watch.times.items() if step > kill.before]
            if later:
                kill.recovered = min(later) - kill.at
                self.recovering.remove(kill)

    def _end_stopped(self) -> None:
        for pid, when in list(self.stopped):
            if time.time() > when:
                self.stopped.remove((pid, when))
                with contextlib.suppress(psutil.Error):
                    if str(SCRIPT) in psutil.Process(pid).cmdline():
                        os.kill(pid, signal.SIGKILL)


def expected_order(replicas: int, settings: Settings) -> list[set[tuple[int, ...]]]:
    """The samples of the shards of every step, drawn with plain PyTorch."""
    order: list[set[tuple[int, ...]]] = []
    epoch, size = 0, settings.batch * replicas
    while len(order) < settings.steps:
        drawn = torch.randperm(settings.samples, generator=torch.Generator().manual_seed(SEED + epoch)).tolist()
        for begin in range(0, settings.samples, size):
            order.append({tuple(drawn[at : at + settings.batch]) for at in range(begin, begin + size, settings.batch)})
        epoch += 1
    return order[: settings.steps]


@dataclass
class Joined:
    """What all processes of a run have written, together."""

    processes: int
    lost: list[int]  # steps that nobody committed
    wrong: list[int]  # steps with other samples than plain PyTorch draws
    difference: float  # the largest one between two losses of the same share
    again: int  # steps that a replica applied, and later applied again; the largest number of a replica
    hashes: set[str]


def join(folder: Path, replicas: int, settings: Settings) -> Joined:
    """Join the files of the processes."""
    computed: dict[int, dict[tuple[int, ...], set[float]]] = defaultdict(lambda: defaultdict(set))
    done: dict[str, Counter[int]] = defaultdict(Counter)
    hashes: set[str] = set()
    paths = list(folder.glob("*.jsonl"))
    for path in paths:
        for line in path.read_text().splitlines():
            event = json.loads(line)
            if event[0] == "computed":
                computed[event[1]][tuple(event[2])].add(event[3])
            elif event[0] == "done":
                done[path.name.partition(".")[0]][event[1]] += 1
            elif event[0] == "end":
                hashes.add(event[1])
    order = expected_order(replicas, settings)
    return Joined(
        len(paths),
        [step for step in range(settings.steps) if not any(step in steps for steps in done.values())],
        [step for step in range(settings.steps) if set(computed[step]) != order[step]],
        max(max(losses) - min(losses) for shares in computed.values() for losses in shares.values()),
        max(sum(steps.values()) - len(steps) for steps in done.values()),
        hashes,
    )


def row_of(name: str, kills: Sequence[Kill], seconds: float, found: Joined, reference: str) -> list[str]:
    """A row of the table."""
    cells = []
    for number in (signal.SIGKILL, signal.SIGSTOP):
        times = sorted(kill.recovered for kill in kills if kill.number == number and kill.recovered is not None)
        if times:
            tail = times[min(len(times) - 1, round(0.95 * len(times)))]
            cells.append(f"{len(times)}: {statistics.median(times):.1f} s ({tail:.1f} s, {times[-1]:.1f} s)")
        else:
            cells.append("")
    same = "equal" if found.hashes == {reference} else f"differ, losses by at most {found.difference:.0e}"
    lost, wrong = str(len(found.lost)), str(len(found.wrong))
    return [name, *cells, lost, wrong, str(found.again), same, f"{seconds / 60:.0f} min"]


COLUMNS = (
    *("Run", "SIGKILL: median (95 %, longest)", "SIGSTOP", "Steps lost", "Steps with other samples"),
    *("Steps applied again", "Weights", "Time"),
)


def keep_row(arguments: argparse.Namespace, row: list[str]) -> None:
    """Add a row to the results, and print all of them."""
    rows = [row]
    if arguments.results is not None:
        with arguments.results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        rows = [json.loads(line) for line in arguments.results.read_text(encoding="utf-8").splitlines()]
    for cells in (COLUMNS, ["---"] * len(COLUMNS), *rows):
        print(f"| {' | '.join(cells)} |")


def reference_hash(arguments: argparse.Namespace, settings: Settings) -> str:
    """The sha256 of the weights of a run without kills."""
    with tempfile.TemporaryDirectory() as name:
        quiet = Settings(**{**asdict(settings), "folder": name, "save_every": 0})
        processes = ["--num_processes", str(arguments.replicas)]
        words = command(quiet, processes if arguments.restarts else ft_options(arguments.replicas, 0))
        seconds = Harness(words, Path(name), arguments.replicas, [], 0.0).run()
        found = join(Path(name), arguments.replicas, quiet)
    if found.lost or found.wrong or len(found.hashes) != 1:
        sys.exit(f"the run without kills is wrong: {found}")
    print(f"without kills: {seconds:.0f} s, sha256 {min(found.hashes)}", flush=True)
    return min(found.hashes)


def measure_kills(arguments: argparse.Namespace, folder: Path) -> None:
    kills = schedule(arguments)
    steps = arguments.steps if arguments.first is None else kills[-1].after + SAVE_EVERY
    settings = Settings(str(folder), steps, arguments.width, save_every=SAVE_EVERY if arguments.restarts else 0)
    print(f"seed {arguments.seed}, {steps} steps, {len(kills)} kills", flush=True)
    reference = reference_hash(arguments, settings)
    processes = arguments.replicas + arguments.spares
    if arguments.restarts:
        name = f"--num_processes {arguments.replicas} --max_restarts"
        launch = ["--num_processes", str(arguments.replicas), "--max_restarts", str(10 * len(kills))]
    else:
        name = f"--ft --num_replicas {arguments.replicas}"
        name += f" --num_spares {arguments.spares}" if arguments.spares else ""
        launch = ft_options(arguments.replicas, arguments.spares)
    launch += ["--monitor"] * arguments.monitor
    seconds = Harness(command(settings, launch), folder, processes, kills, arguments.pause).run(arguments.restarts)
    found = join(folder, arguments.replicas, settings)
    if arguments.monitor:
        ledger = booked(folder, arguments.restarts)
        print(f"seconds without a cause, or with two: {ledger.difference:.2%}; steps computed again: {ledger.again}")
        if not ledger.is_right():
            sys.exit("the ledger differs from the files of the processes")
        if not ledger.print_sums(seconds):
            sys.exit("the ledger differs from the time of the launcher by more than 1%")
    print(f"{found.processes} processes, sha256 {', '.join(sorted(found.hashes))}")
    keep_row(arguments, row_of(f"`{name}`, {len(kills)} kills", kills, seconds, found, reference))
    # With --max_restarts gradients are added in another order: that of DDP's first buckets, for one step.
    exact = arguments.restarts or (found.hashes == {reference} and not found.difference and not found.again)
    if found.lost or found.wrong or not exact:
        sys.exit(f"the run is not that without kills: {found}")


def measure_overhead(arguments: argparse.Namespace) -> None:
    """Seconds of a step without kills, against DDP: five interleaved rounds, medians."""
    variants = {"ddp": ["--num_processes", str(arguments.replicas)], "ft": ft_options(arguments.replicas, 0)}
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(5):
        for name, launch in variants.items():
            with tempfile.TemporaryDirectory() as folder:
                settings = Settings(folder, arguments.steps, arguments.width, arguments.batch, 100 * arguments.batch)
                Harness(command(settings, launch), Path(folder), arguments.replicas, [], 0.0).run()
                path = next(Path(folder).glob("0.*.jsonl"))
                done = [json.loads(line)[-1] for line in path.read_text().splitlines() if '"done"' in line]
            steps = [after - before for before, after in pairwise(done[10:])]
            times[name].append(statistics.median(steps))
            print(f"{name}: {1000 * times[name][-1]:.1f} ms", flush=True)
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    rounds = [ft / ddp for ft, ddp in zip(times["ft"], times["ddp"], strict=True)]
    print(f"a step: {', '.join(f'{name} {1000 * value:.1f} ms' for name, value in medians.items())}")
    print(f"ft / ddp: {statistics.median(rounds):.3f} (rounds {', '.join(f'{ratio:.3f}' for ratio in rounds)})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--spares", type=int, default=0)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--first", type=int, metavar="N", help="only the first N kills of the schedule")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--width", type=int, default=64, help="hidden units of the model")
    parser.add_argument("--batch", type=int, default=256, help="batch size of a replica, with --overhead")
    parser.add_argument("--pause", type=float, default=1.0, help="seconds of a step while a replica is restarted")
    parser.add_argument("--restarts", action="store_true", help=f"--max_restarts, a state every {SAVE_EVERY} steps")
    parser.add_argument("--monitor", action="store_true", help="check the ledger of accel-monitor, too")
    parser.add_argument("--overhead", action="store_true")
    parser.add_argument("--results", type=Path, help="file of rows of the table, to which this run adds its own")
    parser.add_argument("--keep", type=Path, help="a directory for the files of the run")
    arguments = parser.parse_args()
    if arguments.overhead:
        measure_overhead(arguments)
        return
    folder = arguments.keep or Path(tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    try:
        measure_kills(arguments, folder)
    finally:
        if not arguments.keep:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()

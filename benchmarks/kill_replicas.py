"""Kill replicas of a fault-tolerant run again and again, and check that no step and no sample was lost.

    python benchmarks/kill_replicas.py                    4 replicas, 2,000 steps, 200 kills
    python benchmarks/kill_replicas.py --spares 1 --steps 400 --kills 40
    python benchmarks/kill_replicas.py --restarts --steps 400 --kills 10     all processes restarted from checkpoints
    python benchmarks/kill_replicas.py --overhead         steps without kills, against DDP, in five interleaved rounds

The schedule of kills (SIGKILL or SIGSTOP, which replica, after which step) follows from --seed, which is printed. Each
replica writes the samples of every step it computes; a checker joins these files, and compares them with the order that
plain PyTorch draws, and the final weights with those of a run without kills (--reference FILE keeps their sha256).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
from replica_script import BATCH, SAMPLES, SEED

SCRIPT = Path(__file__).with_name("replica_script.py")
STOP_LIMIT = 2.0  # --replica_timeout


@dataclass
class Kill:
    """One planned kill, and what was seen of it."""

    after: int  # committed steps
    replica: int
    number: int  # the signal
    at: float | None = None  # when
    before: int = 0  # the latest committed step then
    recovered: float | None = None  # seconds until the next one


@dataclass
class Life:
    """What one process has written."""

    path: Path
    replica: str
    offset: int = 0
    pid: int = 0
    joined: bool = False
    events: list[list[Any]] = field(default_factory=list)

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
        self.events += new
        return new


class Watch:
    """Follows the files of a run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lives: dict[Path, Life] = {}
        self.committed = -1
        self.committed_at = 0.0

    def look(self) -> None:
        for path in self.folder.glob("*.jsonl"):
            life = self.lives.setdefault(path, Life(path, path.name.split(".")[0]))
            for event in life.read():
                if event[0] == "done" and event[1] > self.committed:
                    self.committed, self.committed_at = event[1], event[-1]

    def alive(self) -> dict[str, Life]:
        """The process of each replica that trains."""
        return {life.replica: life for life in self.lives.values() if life.joined and _runs(life.pid)}


def _runs(pid: int) -> bool:
    try:
        process = psutil.Process(pid)
        if str(SCRIPT) not in process.cmdline():  # another process has the number now
            return False
        return process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_STOPPED)
    except psutil.Error:
        return False


def schedule(arguments: argparse.Namespace) -> list[Kill]:
    """Kills at different steps, in their order."""
    draw = random.Random(arguments.seed)
    steps = sorted(draw.sample(range(5, arguments.steps - 5), arguments.kills))
    replicas = arguments.replicas + arguments.spares
    numbers = (signal.SIGKILL, signal.SIGSTOP)
    return [Kill(step, draw.randrange(replicas), draw.choice(numbers)) for step in steps]


def command(arguments: argparse.Namespace, folder: Path, launch: list[str], save_every: int = 0) -> list[str]:
    words = [str(folder), *map(str, (arguments.steps, arguments.width, save_every, arguments.pause))]
    return [sys.executable, "-m", "accel_launch", "launch", "--cpu", *launch, str(SCRIPT), *words]


def replicas(arguments: argparse.Namespace) -> list[str]:
    return [
        *("--ft", "--num_replicas", str(arguments.replicas), "--num_spares", str(arguments.spares)),
        *("--replica_timeout", str(STOP_LIMIT), "--num_cpu_threads_per_process", "1"),
    ]


def run_with_kills(words: list[str], folder: Path, kills: list[Kill], whole: bool) -> float:
    """Run a command, and kill by the schedule; returns its seconds.

    Args:
        words: the command.
        folder: where its processes write.
        kills: the schedule.
        whole: a stopped process is not noticed by the launcher, so it is killed after the limit.
    """
    began = time.time()
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(words, stdout=log, stderr=log)
    watch, planned, stopped = Watch(folder), list(kills), []
    waiting: list[Kill] = []
    while process.poll() is None:
        watch.look()
        for kill in list(waiting):
            if watch.committed > kill.before:
                kill.recovered = watch.committed_at - kill.at
                waiting.remove(kill)
        if planned and not waiting and watch.committed >= planned[0].after:
            alive = watch.alive()
            if len(alive) > 1 or (whole and alive):
                kill = planned.pop(0)
                life = alive.get(str(kill.replica)) or sorted(alive.items())[kill.replica % len(alive)][1]
                watch.look()
                kill.at, kill.before = time.time(), watch.committed
                os.kill(life.pid, kill.number)
                waiting.append(kill)
                if whole and kill.number == signal.SIGSTOP:
                    stopped.append((life.pid, time.time() + STOP_LIMIT))
        for pid, when in list(stopped):
            if time.time() > when:
                stopped.remove((pid, when))
                with contextlib.suppress(psutil.Error):
                    if str(SCRIPT) in psutil.Process(pid).cmdline():
                        os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)
    watch.look()
    for kill in waiting:
        if watch.committed > kill.before:
            kill.recovered = watch.committed_at - kill.at
    if process.returncode:
        sys.exit(f"the run ended with exit code {process.returncode}:\n{(folder / 'log').read_text()[-4000:]}")
    return time.time() - began


def expected_order(replicas: int, steps: int) -> list[list[list[int]]]:
    """The samples of every shard of every step, drawn with plain PyTorch."""
    order: list[list[list[int]]] = []
    epoch = 0
    while len(order) < steps:
        drawn = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(SEED + epoch)).tolist()
        size = BATCH * replicas
        for begin in range(0, SAMPLES, size):
            step = drawn[begin : begin + size]
            order.append([step[shard * BATCH : (shard + 1) * BATCH] for shard in range(replicas)])
        epoch += 1
    return order[:steps]


def check(folder: Path, replicas: int, steps: int) -> dict[str, Any]:
    """Join what the processes have written; raises SystemExit if a step or a sample was lost."""
    dealt: dict[int, dict[tuple[int, ...], set[float]]] = defaultdict(lambda: defaultdict(set))
    done: dict[int, int] = defaultdict(int)
    hashes, lives = set(), 0
    for path in folder.glob("*.jsonl"):
        lives += 1
        for line in path.read_text().splitlines():
            event = json.loads(line)
            if event[0] == "dealt":
                dealt[event[1]][tuple(event[2])].add(event[3])
            elif event[0] == "done":
                done[event[1]] += 1
            elif event[0] == "end":
                hashes.add(event[1])
    lost = [step for step in range(steps) if not done[step]]
    order = expected_order(replicas, steps)
    wrong = [step for step in range(steps) if set(dealt[step]) != set(map(tuple, order[step]))]
    unequal = [step for step in dealt if any(len(losses) > 1 for losses in dealt[step].values())]
    if lost or wrong or unequal or len(hashes) != 1:
        sys.exit(
            f"steps without a commit: {lost}; with other samples: {wrong}; losses that differ: {unequal}; {hashes}"
        )
    return {"processes": lives, "sha256": hashes.pop()}


def report(name: str, kills: list[Kill], seconds: float, facts: dict[str, Any]) -> None:
    for kind in (signal.SIGKILL, signal.SIGSTOP):
        times = sorted(kill.recovered for kill in kills if kill.number == kind and kill.recovered is not None)
        if times:
            tail = times[min(len(times) - 1, round(0.95 * len(times)))]
            print(
                f"{name}: {len(times)} {kind.name}: to the next committed step median {statistics.median(times):.2f} s,"
                f" 95 % within {tail:.2f} s, longest {times[-1]:.2f} s"
            )
    done = sum(kill.at is not None for kill in kills)
    print(f"{name}: {done} kills in {seconds:.0f} s; {', '.join(f'{key} {value}' for key, value in facts.items())}")


def reference_hash(arguments: argparse.Namespace) -> str:
    """The sha256 of the weights of a run without kills."""
    key = f"{arguments.replicas} {arguments.steps} {arguments.width}"
    kept = json.loads(arguments.reference.read_text()) if arguments.reference and arguments.reference.exists() else {}
    if key not in kept:
        with tempfile.TemporaryDirectory() as folder:
            quiet = argparse.Namespace(**{**vars(arguments), "spares": 0, "pause": 0.0})
            seconds = run_with_kills(command(quiet, Path(folder), replicas(quiet)), Path(folder), [], False)
            facts = check(Path(folder), arguments.replicas, arguments.steps)
            print(f"without kills: {seconds:.0f} s, sha256 {facts['sha256']}", flush=True)
            kept[key] = facts["sha256"]
        if arguments.reference:
            arguments.reference.write_text(json.dumps(kept))
    return str(kept[key])


def measure_overhead(arguments: argparse.Namespace) -> None:
    """Seconds of a step without kills, against DDP: five interleaved rounds, medians."""
    arguments.pause = 0.0
    variants = {
        "ddp": ["--num_processes", str(arguments.replicas), "--num_cpu_threads_per_process", "1"],
        "ft": replicas(arguments),
    }
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(5):
        for name, launch in variants.items():
            with tempfile.TemporaryDirectory() as folder:
                run_with_kills(command(arguments, Path(folder), launch), Path(folder), [], False)
                path = next(Path(folder).glob("0.*.jsonl"))
                done = [json.loads(line)[-1] for line in path.read_text().splitlines() if '"done"' in line]
            times[name].append((done[-1] - done[10]) / (len(done) - 11))
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
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--width", type=int, default=64, help="hidden units of the model")
    parser.add_argument("--pause", type=float, default=0.3, help="seconds that each step takes at least")
    parser.add_argument("--restarts", action="store_true", help="--max_restarts with a state saved every 20 steps")
    parser.add_argument("--overhead", action="store_true")
    parser.add_argument("--reference", type=Path, help="file with the sha256 of runs without kills")
    parser.add_argument("--keep", type=Path, help="a directory for the files of the run")
    arguments = parser.parse_args()
    if arguments.overhead:
        measure_overhead(arguments)
        return
    print(f"seed {arguments.seed}, {arguments.steps} steps, {arguments.kills} kills", flush=True)
    folder = arguments.keep or Path(tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    kills = schedule(arguments)
    try:
        if arguments.restarts:
            launch = ["--num_processes", str(arguments.replicas), "--max_restarts", str(10 * arguments.kills)]
            launch += ["--num_cpu_threads_per_process", "1"]
            seconds = run_with_kills(command(arguments, folder, launch, 20), folder, kills, True)
            events = [json.loads(line) for path in folder.glob("0.*.jsonl") for line in path.read_text().splitlines()]
            again = sum(event[0] == "done" for event in events) - arguments.steps
            report("--max_restarts", kills, seconds, {"steps computed again": again})
            return
        expected = reference_hash(arguments)
        seconds = run_with_kills(command(arguments, folder, replicas(arguments)), folder, kills, False)
        facts = check(folder, arguments.replicas, arguments.steps)
        report(f"--ft, {arguments.spares} spares", kills, seconds, facts)
        if facts["sha256"] != expected:
            sys.exit(f"the weights differ from those of a run without kills, {expected}")
        print("no committed step and no sample was lost, and the weights are those of the run without kills")
    finally:
        if not arguments.keep:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()

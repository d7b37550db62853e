"""Machines join, leave, are killed and cut off while a run trains, and no step and no sample is lost or repeated.

    python benchmarks/machines_come_and_go.py                        --num_machines 2:8, twelve events
    python benchmarks/machines_come_and_go.py --events 30 --seed 1   another schedule
    python benchmarks/machines_come_and_go.py --machines 2:3 --hosts 3 --events 5 --steps 60

The hosts are network namespaces at a switch, so it needs root and iproute2. The schedule follows from --seed: machines
join, one or two at once; leave on SIGTERM; are killed with all their processes, that of the rendezvous too, whose
launcher is then started again; and are cut off from the network, which is mended. Every third host has two processes.

Each process writes the samples of every share that it computes. The checker of kill_replicas.py joins these files and
compares them with the order that plain PyTorch draws; the weights must be those of a single process. --max_restarts is
0: machines that join or leave are not failures.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from _network_hosts import Host, namespaces
from kill_replicas import SCRIPT, Joined, Life, expected_order, join
from replica_script import Settings

SHARDS, BATCH, SAMPLES = 8, 8, 1600  # logical shards, samples of each, samples of an epoch
SAVE_EVERY = 10  # steps
SLOW_SECONDS, FAST_SECONDS = 1.0, 0.05  # length of steps while machines come and go, and between events
PATIENCE = 240.0
"""Seconds within which the run must train again after an event."""
LEAVES = ("SIGTERM", "SIGKILL", "cut")


def processes_of(host: int) -> int:
    """Processes of a host."""
    return 2 if host % 3 == 2 else 1


@dataclass
class Start:
    """One start of all processes."""

    size: int  # processes
    at: float
    last: int = -1  # the latest step that it applied
    trained_at: float = math.inf  # when it applied the first one


class Watch:
    """Follows the files of a run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lives: dict[Path, tuple[Life, list[str]]] = {}
        self.starts: dict[str, Start] = {}
        self.committed = -1

    def look(self) -> None:
        """Read what is new."""
        for path in self._folder.glob("*.jsonl"):
            life, names = self._lives.setdefault(path, (Life(path), []))
            for event in life.read():
                if event[0] == "start":
                    names.append(event[3])
                    self.starts.setdefault(event[3], Start(event[4], event[-1]))
                elif event[0] == "done":
                    start = self.starts[names[0]]
                    start.trained_at = min(start.trained_at, event[-1])
                    start.last = max(start.last, event[1])
                    self.committed = max(self.committed, event[1])


@dataclass
class Event:
    """Something that happens to machines, and what was seen of it."""

    what: str
    hosts: list[int]
    steps: int  # how many are trained before it
    seen: list[str] = field(default_factory=list)  # cells of the table


def schedule(draw: random.Random, count: int, hosts: int, least: int, most: int) -> list[Event]:
    """Events that leave at least one machine, and after which enough are there again."""
    present, events = set(range(least)), list[Event]()
    while len(events) < count:
        absent = sorted(set(range(hosts)) - present)
        steps = draw.randrange(2, 9)
        too_few = len(present) < least
        if absent and (too_few or len(present) == 1 or draw.random() < 0.5):
            joining = draw.sample(absent, min(len(absent), draw.choice((1, 1, 2))))
            events.append(Event("join", joining, 0 if too_few else steps))
            present |= set(joining)
        elif draw.random() < 0.15:
            events.append(Event("main host killed", [0], steps))
        else:
            host = draw.choice(sorted(present - {0}))
            events.append(Event(draw.choice(LEAVES), [host], steps))
            # One that was cut off comes back.
            if events[-1].what != "cut":
                present.discard(host)
    if len(present) < least:
        events.append(Event("join", draw.sample(sorted(set(range(hosts)) - present), least - len(present)), 0))
    return events


class Harness:
    """A run on hosts that come and go."""

    def __init__(self, hosts: namespaces.Hosts, machines: str, folder: Path, settings: Settings) -> None:
        self._hosts, self._machines, self._folder, self._settings = hosts, machines, folder, settings
        self._least, self._most = map(int, machines.split(":"))
        self.launchers: dict[int, Host] = {}
        self.gone: list[tuple[int, Host]] = []
        self.watch = Watch(folder)
        self.set_pace(SLOW_SECONDS)

    def set_pace(self, seconds: float) -> None:
        """Make steps as long."""
        (self._folder / "pace.part").write_text(str(seconds))
        (self._folder / "pace.part").replace(self._folder / "pace")

    def start(self, host: int) -> None:
        """Start the launcher of a host."""
        words = [sys.executable, "-m", "accel_launch", "launch", "--cpu", f"--num_machines={self._machines}"]
        words += [f"--nproc_per_node={processes_of(host)}", "--main_process_ip=10.77.0.1", "--machine_timeout=6"]
        words += ["--rdzv_conf=last_call_timeout=3,timeout=200", "--num_cpu_threads_per_process=1"]
        words += [str(SCRIPT), json.dumps(asdict(self._settings))]
        self.launchers[host] = Host.start(self._hosts, host, words, self._folder)

    def processes(self) -> int:
        """How many processes must train: those of the machines that are here, at most as many as the range allows."""
        return sum(map(processes_of, sorted(self.launchers)[: self._most]))

    def fail(self, why: str) -> None:
        """End with what everybody said."""
        shown = [f"-- host{host}\n{one.text()[-3000:]}" for host, one in [*self.gone, *self.launchers.items()]]
        raise RuntimeError("\n".join([why, *shown]))

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for something, while no launcher may end."""
        deadline = time.monotonic() + PATIENCE
        while not condition():
            self.watch.look()
            ended = [host for host, one in self.launchers.items() if one.process.poll() is not None]
            if ended or time.monotonic() > deadline:
                self.fail(f"waited for {what}: {'ended: host' + str(ended) if ended else 'in vain'}")
            time.sleep(0.05)

    def trains(self, since: float) -> Start | None:
        """The latest start, if it has all processes, began after a moment, and has applied a step."""
        latest = max(self.watch.starts.values(), key=lambda one: one.at, default=None)
        if latest is None or latest.at < since or latest.last < 0 or latest.size != self.processes():
            return None
        return latest

    def leave(self, host: int, number: int) -> None:
        """End the launcher of a host, with all its processes if the signal is SIGKILL."""
        launcher = self.launchers.pop(host)
        self.gone.append((host, launcher))
        if number == signal.SIGKILL:
            launcher.kill()
        else:
            launcher.process.send_signal(number)
            if not launcher.wait(PATIENCE):
                self.fail(f"host{host} does not leave")

    def happen(self, event: Event) -> None:
        """Make an event happen, and wait until the run trains with the machines that are left."""
        before = self.watch.committed
        self.set_pace(FAST_SECONDS)
        self.wait(lambda: not self.trains(0) or self.watch.committed >= before + event.steps, f"{event.steps} steps")
        self.set_pace(SLOW_SECONDS)
        self.watch.look()
        at, step, number = time.time(), self.watch.committed, len(self.launchers)
        if event.what == "join":
            for host in event.hosts:
                self.start(host)
        elif event.what == "cut":
            (host,) = event.hosts
            self._hosts.set_cable(False, host)
            absent = self.launchers.pop(host)
            if len(self.launchers) >= self._least:
                self.wait(lambda: self.trains(at) is not None, "training without the host that is cut off")
            else:
                time.sleep(10)
            self._hosts.set_cable(True, host)
            self.launchers[host] = absent
        else:
            self.leave(event.hosts[0], getattr(signal, "SIGKILL" if "killed" in event.what else event.what))
            if event.what == "main host killed":
                time.sleep(2)
                self.start(0)
        if len(self.launchers) < self._least:
            event.seen = [str(step), f"{number} -> {len(self.launchers)}", "waits for machines", ""]
            return
        self.wait(lambda: self.trains(at) is not None, f"training after {event}")
        start = self.trains(at)
        assert start is not None
        seconds = f"{start.trained_at - at:.0f} s"
        event.seen = [str(step), f"{number} -> {len(self.launchers)}", f"{start.size} processes", seconds]

    def finish(self) -> list[int | None]:
        """Wait for the end; the exit codes."""
        self.set_pace(0.0)
        for host, launcher in self.launchers.items():
            if not launcher.wait(PATIENCE):
                self.fail(f"host{host} does not end")
        return [launcher.process.returncode for launcher in self.launchers.values()]

    def close(self) -> None:
        """End what still runs."""
        for launcher in self.launchers.values():
            launcher.kill()
            launcher.wait(10)


def repeated(folder: Path, settings: Settings) -> list[int]:
    """Steps that were applied last in a start in which a sample was computed twice, or not at all."""
    computed: dict[str, dict[int, Counter[tuple[int, ...]]]] = defaultdict(lambda: defaultdict(Counter))
    applied: dict[int, tuple[float, str]] = {}
    for path in folder.glob("*.jsonl"):
        start = ""
        for event in map(json.loads, path.read_text().splitlines()):
            if event[0] == "start":
                start = event[3]
            elif event[0] == "computed":
                computed[start][event[1]][tuple(event[2])] += 1
            elif event[0] == "done":
                applied[event[1]] = max(applied.get(event[1], (0.0, "")), (event[-1], start))
    order = expected_order(SHARDS, settings)
    return [
        step
        for step in range(settings.steps)
        if step not in applied or computed[applied[step][1]][step] != Counter(order[step])
    ]


def reference(settings: Settings) -> Joined:
    """The same training in a single process, without a launcher."""
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "pace").write_text("0")
        alone = Settings(**{**asdict(settings), "folder": name})
        environment = {key: value for key, value in os.environ.items() if not key.startswith("ACCEL")}
        command = [sys.executable, str(SCRIPT), json.dumps(asdict(alone))]
        subprocess.run(command, env={**environment, "OMP_NUM_THREADS": "1"}, check=True)
        return join(Path(name), SHARDS, alone)


@dataclass
class Found:
    """What a schedule led to."""

    events: list[Event]
    problems: list[str]
    again: int  # most steps that a process rank applied again
    starts: int
    sha256: str
    text: str  # what the launchers said


def run(seed: int, events: int, machines: str, hosts: int, steps: int) -> Found:
    """Run a schedule, and check the files that the processes left.

    Raises:
        RuntimeError: the run hung or failed.
    """
    least, most = map(int, machines.split(":"))
    folder = Path(tempfile.mkdtemp(prefix="machines-"))
    settings = Settings(str(folder), steps, batch=BATCH, samples=SAMPLES, save_every=SAVE_EVERY, logical_shards=SHARDS)
    planned = schedule(random.Random(seed), events, hosts, least, most)
    expected = reference(settings)
    try:
        with namespaces.Hosts(hosts) as network:
            harness = Harness(network, machines, folder, settings)
            try:
                for host in range(least):
                    harness.start(host)
                harness.wait(lambda: harness.trains(0) is not None, "the first start")
                for event in planned:
                    harness.happen(event)
                    print(f"| {event.what} | {_names(event)} | {' | '.join(event.seen)} |", flush=True)
                codes = harness.finish()
            finally:
                harness.close()
        found, problems = join(folder, SHARDS, settings), []
        if set(codes) != {0}:
            problems.append(f"exit codes {codes}")
        if found.lost or found.wrong:
            problems.append(f"steps lost: {found.lost}; with other samples: {found.wrong}")
        if wrong := repeated(folder, settings):
            problems.append(f"steps in which a sample is missing or repeated: {wrong}")
        if found.hashes != expected.hashes:
            problems.append(f"weights {found.hashes}, and in a single process {expected.hashes}")
        said = [f"-- host{host}\n{one.text()}" for host, one in [*harness.gone, *harness.launchers.items()]]
        hashes = ", ".join(sorted(found.hashes))
        return Found(planned, problems, found.again, len(harness.watch.starts), hashes, "\n".join(said))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _names(event: Event) -> str:
    return ", ".join(f"host{host}" for host in event.hosts)


def main() -> int:
    """Run what the command line asks for; 1 if something was lost, repeated or different."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machines", default="2:8", metavar="MIN:MAX")
    parser.add_argument("--hosts", type=int, default=8, help="hosts of the network")
    parser.add_argument("--events", type=int, default=12)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seed", type=int, default=2053)
    parser.add_argument("--verbose", action="store_true", help="what the launchers said, too")
    arguments = parser.parse_args()
    if reason := namespaces.missing():
        print(f"machines_come_and_go.py needs root and iproute2: {reason}")
        return 0
    began = time.monotonic()
    print(f"seed {arguments.seed}, --num_machines {arguments.machines}")
    print("| event | hosts | after step | machines | then | until a step is applied |\n|---|---|---|---|---|---|")
    found = run(arguments.seed, arguments.events, arguments.machines, arguments.hosts, arguments.steps)
    if arguments.verbose or found.problems:
        print(found.text)
    print(
        f"\n{arguments.steps} steps, {len(found.events)} events, {found.starts} starts: "
        f"{found.again} steps applied again after a kill, sha256 {found.sha256[:16]}, "
        f"{time.monotonic() - began:.0f} s"
    )
    print("\n".join(found.problems) or "no sample lost, none repeated, weights equal to those of a single process")
    return bool(found.problems)


if __name__ == "__main__":
    sys.exit(main())

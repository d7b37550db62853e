"""Kill processes, actors and nodes of a run on a Ray cluster, and check that no step and no sample was lost.

    python benchmarks/kill_on_ray.py --results ray.jsonl                 --ft: four replicas on two nodes, twelve kills
    python benchmarks/kill_on_ray.py --results ray.jsonl --restarts      the same schedule with --max_restarts
    python benchmarks/kill_on_ray.py --kills 4 --seed 3

Each prints a table of all results in the file. The nodes of the cluster are network namespaces, so it needs root,
iproute2 and Ray (scripts/components ray hosts). The schedule follows from --seed: a process of the run gets SIGKILL or,
with --ft, SIGSTOP; its actor gets SIGKILL; or everything on the second node does, which is started again after
some seconds. The checker is that of kill_replicas.py, which also describes what the processes write.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
from kill_replicas import MOST_DELAY, SAVE_EVERY, SCRIPT, Harness, Joined, Kill, Life, join
from replica_script import Settings

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from components import ray_nodes

NODES, REPLICAS = 2, 4
NODE_AWAY_SECONDS = 3.0
# --replica_timeout: longer than a share of a step while replicas are being restarted (--pause), several times over.
STOP_LIMIT = 10.0
# --heartbeat_timeout: on a machine with much other work heartbeats are late.
HEARTBEAT_LIMIT = 5.0
PROCESS, STOP, ACTOR, NODE = "process", "SIGSTOP", "actor", "node"
COLUMNS = (
    *("Run", "Process: median (longest)", "SIGSTOP", "Actor", "Node", "Steps lost", "Steps with other samples"),
    *("Steps applied again", "Weights", "Time"),
)


@dataclass
class RayKill(Kill):
    """A kill on a cluster."""

    what: str = PROCESS


def schedule(seed: int, steps: int, count: int, restarts: bool) -> list[RayKill]:
    """Kills at different steps, in their order: every kind about equally often."""
    draw = random.Random(seed)
    kinds = [PROCESS, ACTOR, NODE] if restarts else [PROCESS, STOP, ACTOR, NODE]
    whats = [kinds[index % len(kinds)] for index in range(count)]
    draw.shuffle(whats)
    after = sorted(draw.sample(range(5, steps - 5), count))
    numbers = {STOP: signal.SIGSTOP}
    return [
        RayKill(
            step, draw.randrange(REPLICAS), numbers.get(what, signal.SIGKILL), draw.random() * MOST_DELAY, what=what
        )
        for step, what in zip(after, whats, strict=True)
    ]


class RayHarness(Harness):
    """A run on a cluster."""

    def __init__(
        self,
        nodes: ray_nodes.RayNodes,
        settings: Settings,
        launch: Sequence[str],
        kills: Sequence[RayKill],
        pause: float,
    ) -> None:
        words = ["-m", "accel_launch", "launch", "--ray", nodes.address, "--num_machines", str(NODES), "--cpu", *launch]
        command = nodes.hosts.command(0, [str(nodes.python), *words, str(SCRIPT), json.dumps(asdict(settings))])
        super().__init__(command, Path(settings.folder), REPLICAS, kills, pause)
        self.environment, self._nodes = nodes.environment(), nodes
        self.returning: list[threading.Thread] = []

    def kill(self, life: Life, kill: Kill) -> None:
        assert isinstance(kill, RayKill)
        if kill.what == ACTOR:
            os.kill(psutil.Process(life.pid).ppid(), kill.number)
        elif kill.what == NODE:
            self._nodes.kill_node(1)
            self.returning.append(threading.Thread(target=self._return))
            self.returning[-1].start()
        else:
            super().kill(life, kill)

    def _return(self) -> None:
        time.sleep(NODE_AWAY_SECONDS)
        self._nodes.start_node(1)

    def run(self, restarts_all: bool = False) -> float:
        try:
            return super().run(restarts_all)
        finally:
            for thread in self.returning:
                thread.join()


def options(restarts: bool, kills: int) -> tuple[str, list[str]]:
    """The name of a run, and its options."""
    if not restarts:
        return f"--ft --num_replicas {REPLICAS}", [
            *("--ft", "--num_replicas", str(REPLICAS), "--replica_timeout", str(STOP_LIMIT)),
            *("--heartbeat_timeout", str(HEARTBEAT_LIMIT), "--machine_timeout", "5"),
        ]
    limits = ("--max_restarts", str(10 * kills), "--machine_timeout", "5", "--ray_timeout", "300")
    return f"--num_processes {REPLICAS} --max_restarts", ["--num_processes", str(REPLICAS), *limits]


def cells(kills: Sequence[RayKill], found: Joined, reference: str, seconds: float) -> list[str]:
    """The cells of a row, without its name."""
    row = []
    for what in (PROCESS, STOP, ACTOR, NODE):
        times = [kill.recovered for kill in kills if kill.what == what and kill.recovered is not None]
        row.append(f"{len(times)}: {statistics.median(times):.1f} s ({max(times):.1f} s)" if times else "")
    same = "equal" if found.hashes == {reference} else f"differ, losses by at most {found.difference:.0e}"
    counts = str(len(found.lost)), str(len(found.wrong)), str(found.again)
    return [*row, *counts, same, f"{seconds / 60:.0f} min"]


def taken_back(folder: Path) -> list[tuple[str, int]]:
    """Replicas and steps that were applied again, and not only because a process was killed right after it had.

    The others may not have applied that step yet; then all compute it again without the process.
    """
    lives: dict[str, list[list[int]]] = defaultdict(list)
    for path in sorted(folder.glob("*.jsonl"), key=lambda path: json.loads(path.open().readline())[-1]):
        events = map(json.loads, path.read_text().splitlines())
        lives[path.name.partition(".")[0]].append([event[1] for event in events if event[0] == "done"])
    return [
        (replica, step)
        for replica, processes in lives.items()
        for number, steps in enumerate(processes)
        for step in steps
        if steps.count(step) > 1 or (step != steps[-1] and any(step in later for later in processes[number + 1 :]))
    ]


@dataclass
class Result:
    """What a schedule led to."""

    row: list[str]
    problems: list[str]
    log: str


def measure(
    nodes: ray_nodes.RayNodes,
    seed: int,
    steps: int,
    count: int,
    restarts: bool,
    pause: float,
    keep: Path | None = None,
) -> Result:
    """Run a schedule, and the same training without kills."""
    kills, found = schedule(seed, steps, count, restarts), dict[str, Joined]()
    name, launch = options(restarts, count)
    seconds, log, back = 0.0, "", list[tuple[str, int]]()
    for run, planned in (("quiet", []), ("killed", kills)):
        folder = Path(tempfile.mkdtemp(prefix="ray-kills-"))
        try:
            settings = Settings(str(folder), steps, save_every=SAVE_EVERY if restarts else 0)
            seconds = RayHarness(nodes, settings, launch, planned, pause).run(restarts)
            found[run] = join(folder, REPLICAS, settings)
            back, log = taken_back(folder), (folder / "log").read_text()
        finally:
            if keep is not None and run == "killed":
                shutil.copytree(folder, keep, dirs_exist_ok=True)
            shutil.rmtree(folder, ignore_errors=True)
    quiet, killed = found["quiet"], found["killed"]
    problems = []
    if quiet.lost or quiet.wrong or len(quiet.hashes) != 1:
        problems.append(f"the run without kills is wrong: {quiet}")
    # With --max_restarts gradients are added in another order: that of DDP's first buckets, for one step.
    same = killed.hashes == quiet.hashes and not killed.difference and not back
    if killed.lost or killed.wrong or not (restarts or same):
        problems.append(f"the run is not that without kills: {killed}, replica and step applied again: {back}")
    row = [f"`{name}`, {count} kills", *cells(kills, killed, min(quiet.hashes), seconds)]
    return Result(row, problems, log)


def main() -> int:
    """Run what the command line asks for; 1 if something was lost, or is different."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--restarts", action="store_true", help=f"--max_restarts, a state every {SAVE_EVERY} steps")
    parser.add_argument("--kills", type=int, default=12)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seed", type=int, default=2053)
    parser.add_argument("--pause", type=float, default=3.0, help="seconds of a step while a replica is restarted")
    parser.add_argument("--results", type=Path, help="file of rows of the table, to which this run adds its own")
    parser.add_argument("--keep", type=Path, help="a directory for the files of the run with kills")
    parser.add_argument("--verbose", action="store_true", help="what the launcher said, too")
    arguments = parser.parse_args()
    if reason := ray_nodes.missing():
        print(f"kill_on_ray.py needs a cluster of two nodes: {reason}")
        return 0
    print(f"seed {arguments.seed}", flush=True)
    with ray_nodes.RayNodes() as nodes:
        given = arguments.seed, arguments.steps, arguments.kills, arguments.restarts, arguments.pause, arguments.keep
        result = measure(nodes, *given)
    if arguments.verbose or result.problems:
        print(result.log)
    rows = [result.row]
    if arguments.results is not None:
        with arguments.results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(result.row) + "\n")
        rows = [json.loads(line) for line in arguments.results.read_text(encoding="utf-8").splitlines()]
    for row in (COLUMNS, ["---"] * len(COLUMNS), *rows):
        print(f"| {' | '.join(row)} |")
    print("\n".join(result.problems))
    return bool(result.problems)


if __name__ == "__main__":
    sys.exit(main())

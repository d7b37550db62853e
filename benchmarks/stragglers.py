"""How reliably the monitor names a slow rank: drawn cases of real slowness, and undisturbed runs.

    python benchmarks/stragglers.py --cases 100 --undisturbed 100 [--seed 0] [--results FILE]

Each case trains a model with DDP on 2 to 4 ranks. After some steps one of them becomes slow: its data set sleeps
("data"), its samples are written to a disk and read back ("disk"), its sequences are longer ("compute"), or a busy
process is bound to its core ("host"). A case is found if the first rank that the monitor names is the slow one, and
right if the part is, too. Undisturbed runs are made next to a process that is busy now and then, on any core.

On a machine whose cores are all in use, every rank waits for a processor, and the one that shares its core differs
little from the others. So each case begins when the machine is quiet, and is run again if other processes took more
than a tenth of the processors meanwhile; ``--patience`` says for how many seconds in all it waits for that. For the
same reason a case of "host" has at most as many ranks as there are cores. With ``--results``, each result is appended
to a file, and cases that are in it are not run again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn
from torch.utils.data import Dataset

from accel import Accelerator
from accel_state.testing import preload, run_world

PARTS = {"data": "data", "disk": "data", "compute": "compute", "host": "host"}
WIDTH = 160
STEPS_AFTER = 45
MOST_OTHERS = 0.1
NOISE = """
import time
while True:
    end = time.time() + 0.05
    while time.time() < end:
        pass
    time.sleep(0.2)
"""


@dataclass(frozen=True)
class Case:
    """One run.

    Attributes:
        kind: what makes the rank slow; None for an undisturbed run.
        world: number of ranks.
        rank: the slow one.
        begin: the step at which it becomes slow.
        amount: by how much of a step.
        length: rows of a batch.
    """

    kind: str | None
    world: int
    rank: int
    begin: int
    amount: float
    length: int


def draw(seed: int, number: int, kind: str | None) -> Case:
    """The case of a number, whichever were drawn before."""
    random_ = random.Random(f"{seed} {number} {kind}")
    world = random_.choice([2, 2, 3, 4])
    if kind == "host":
        world = min(world, max(2, len(os.sched_getaffinity(0))))
    return Case(
        kind,
        world,
        random_.randrange(world),
        random_.randint(20, 30),
        random_.uniform(0.5, 1.5),
        random_.choice([300, 500]),
    )


class Rows(Dataset):
    """Rows for training; the slow rank's are slow from some step on."""

    def __init__(self, case: Case, rank: int, folder: str) -> None:
        self.case, self.slow, self.step, self.seconds = case, rank == case.rank, 0, 0.0
        self.file = Path(folder) / f"rows-{rank}"
        self.file.write_bytes(os.urandom(1 << 20))

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> torch.Tensor:
        case = self.case
        late = self.slow and self.step >= case.begin
        length = case.length
        if late and case.kind == "data":
            time.sleep(self.seconds)
        elif late and case.kind == "disk":
            self._read(self.seconds)
        elif late and case.kind == "compute":
            length = int(length * (1 + case.amount))
        generator = torch.Generator().manual_seed(index)
        return torch.randn(length, WIDTH, generator=generator)

    def _read(self, seconds: float) -> None:
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            descriptor = os.open(self.file, os.O_RDWR)
            try:
                os.pwrite(descriptor, os.urandom(4096), 0)
                os.fsync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                os.pread(descriptor, 1 << 20, 0)
            finally:
                os.close(descriptor)


def _busy(core: int | None) -> subprocess.Popen[bytes]:
    bind = "" if core is None else f"import os; os.sched_setaffinity(0, {{{core}}})\n"
    return subprocess.Popen([sys.executable, "-c", f"{bind}while True: pass"])


def train(case: Case, folder: str) -> float:
    """Train on one rank; returns the processor seconds of it and of the process that shares its core."""
    began = time.process_time()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    accelerator = Accelerator(monitor=True, project_dir=folder)
    model = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())])
    rows = Rows(case, accelerator.process_index, folder)
    loader = torch.utils.data.DataLoader(rows, batch_size=None, sampler=range(10_000))
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3), loader)
    cores = sorted(os.sched_getaffinity(0))
    busy, used = None, 0.0
    times = [time.perf_counter()]
    try:
        for step, inputs in zip(range(case.begin + STEPS_AFTER), loader, strict=False):
            rows.step = step + 1
            if step == case.begin - 1:
                typical = statistics.median(late - early for early, late in itertools.pairwise(times[5:]))
                rows.seconds = case.amount * typical
                if case.kind == "host" and rows.slow:
                    core = cores[case.rank % len(cores)]
                    os.sched_setaffinity(0, {core})
                    busy = _busy(core)
            accelerator.backward(model(inputs).pow(2).mean())
            optimizer.step()
            optimizer.zero_grad()
            times.append(time.perf_counter())
    finally:
        if busy is not None:
            used = _ended(busy)
    accelerator.end_training()
    return used + time.process_time() - began


def _ended(process: subprocess.Popen[bytes]) -> float:
    """End a process; returns its processor seconds."""
    times = psutil.Process(process.pid).cpu_times()
    process.kill()
    process.wait()
    return times.user + times.system


def run(case: Case) -> dict[str, Any]:
    """Run a case; returns what the monitor named first, the step at which it was named, and what other processes used.

    An undisturbed run is made next to a process that is busy now and then.
    """
    noise = subprocess.Popen([sys.executable, "-c", NOISE]) if case.kind is None else None
    began, busy_before = time.perf_counter(), _busy_seconds()
    with tempfile.TemporaryDirectory() as folder:
        try:
            used = sum(run_world(train, case.world, case, folder, timeout=180))
        finally:
            used_by_noise = 0.0 if noise is None else _ended(noise)
        available = (time.perf_counter() - began) * (os.cpu_count() or 1)
        others = max(0.0, _busy_seconds() - busy_before - used - used_by_noise) / available
        lines = [json.loads(line) for line in (Path(folder) / "monitor" / "rank-00000.jsonl").read_text().splitlines()]
    found = [line for line in lines if line["kind"] == "straggler"]
    steps = [line for line in lines if line["kind"] == "sample"]
    if not found:
        return {"named": None, "others": others}
    first = found[0]
    at = next((line["step"] for line in steps if line["at"] >= first["at"]), first["last"])
    return {"named": first["rank"], "part": first["part"], "step": at, "last": first["last"], "others": others}


def _busy_seconds() -> float:
    """Seconds that all processors of the machine have worked, or were taken from it."""
    times = psutil.cpu_times()
    return sum(getattr(times, name, 0.0) for name in ("user", "nice", "system", "irq", "softirq", "steal"))


class Results:
    """The results of cases, kept in a file if there is one.

    Args:
        file: lines of JSON, one a case.
        patience: seconds, in all, to wait for a quiet machine and to run cases again.
    """

    def __init__(self, file: Path | None, patience: float) -> None:
        self._file, self._patience = file, patience
        lines = file.read_text().splitlines() if file is not None and file.exists() else []
        self._known = {json.dumps(line["case"]): line["result"] for line in map(json.loads, lines)}

    def of(self, case: Case) -> dict[str, Any]:
        """The result of a case, which is run unless it is known."""
        key = json.dumps(asdict(case))
        if key not in self._known:
            self._known[key] = self._run(case)
            if self._file is not None:
                with self._file.open("a") as stream:
                    stream.write(json.dumps({"case": asdict(case), "result": self._known[key]}) + "\n")
        return self._known[key]

    def _run(self, case: Case) -> dict[str, Any]:
        while True:
            began = time.monotonic()
            while self._patience > time.monotonic() - began and psutil.cpu_percent(1.0) > 100 * MOST_OTHERS:
                pass  # cpu_percent waits
            waited = time.monotonic() - began
            result = run(case)
            if result["others"] <= MOST_OTHERS:
                self._patience -= waited
                return result
            self._patience -= time.monotonic() - began
            if self._patience <= 0:
                return result


def main() -> None:
    """Run the drawn cases and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=20)
    parser.add_argument("--undisturbed", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, metavar="FILE", help="keep results here, and run what is missing")
    parser.add_argument("--patience", type=float, default=3600.0, metavar="SECONDS", help="to wait for a quiet machine")
    parser.add_argument("--verbose", action="store_true")
    arguments = parser.parse_args()
    # Ranks import nothing: it would take three times as long as their steps. An optimizer imports torch._dynamo.
    preload("accel", "accel.accelerator", "accel_monitor.accelerator", "torch.nn.parallel", "torch._dynamo")
    results = Results(arguments.results, arguments.patience)
    found, right, total, delays, disturbed = Counter(), Counter(), Counter(), [], 0
    named: dict[int, Counter[str]] = defaultdict(Counter)  # by the slow rank
    for number in range(arguments.cases):
        kind = list(PARTS)[number % len(PARTS)]
        case = draw(arguments.seed, number, kind)
        result = results.of(case)
        disturbed += result["others"] > MOST_OTHERS
        total[kind] += 1
        is_found = result["named"] == case.rank
        is_right = is_found and result["part"] == PARTS[kind]
        found[kind] += is_found
        right[kind] += is_right
        named[case.rank]["right" if is_found else "none" if result["named"] is None else "another"] += 1
        if is_found:
            delays.append(result["last"] - case.begin)
        if arguments.verbose or not is_right:
            print(f"  {asdict(case)}: {result}", flush=True)
    alarms = 0
    for number in range(arguments.undisturbed):
        case = draw(arguments.seed, number, None)
        result = results.of(case)
        disturbed += result["others"] > MOST_OTHERS
        if result["named"] is not None:
            alarms += 1
            print(f"  false alarm {asdict(case)}: {result}", flush=True)
    print("| slowness | cases | right rank | right rank and part |\n| --- | ---: | ---: | ---: |")
    for kind in PARTS:
        print(f"| {kind} | {total[kind]} | {found[kind]} | {right[kind]} |")
    print(f"| all | {total.total()} | {found.total()} | {right.total()} |")
    print("\n| slow rank | cases | right rank | another rank | no rank |\n| ---: | ---: | ---: | ---: | ---: |")
    for rank, counts in sorted(named.items()):
        print(f"| {rank} | {counts.total()} | {counts['right']} | {counts['another']} | {counts['none']} |")
    print()
    if delays:
        print(f"steps to the report: median {statistics.median(delays):g}, largest {max(delays)}")
    print(f"false alarms in {arguments.undisturbed} undisturbed runs: {alarms}")
    print(f"runs in which other processes took more than {MOST_OTHERS:.0%} of the processors: {disturbed}")


if __name__ == "__main__":
    main()

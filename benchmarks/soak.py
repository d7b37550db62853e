"""What long runs leave behind: memory, descriptors, threads, processes and temporary files, as a slope an iteration.

    python benchmarks/soak.py [SCENARIO ...] [--ranks 1 2] [--share 1.0]

Each scenario repeats one thing in one process per rank, and looks at rank 0 after each twentieth of the iterations. The
first quarter is not counted: caches fill there. A slope is the median of those between all pairs of the rest, for 1,000
iterations; what stays the same has none. Memory is what the process has for itself (USS), after a garbage collection.
``--share`` runs a part of the iterations.

The row "groups" comes with "sweep" on several ranks: it is torch alone, which keeps memory for each process group that
it has destroyed. A sweep makes one for each Accelerator, and may keep as much.

"restarts" is a launcher whose script fails 30 times; its figures are those of the launcher. "killed" is 20 launchers
that are killed with SIGKILL, one after the other: the processes and temporary files that are left after each.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import _measure
import psutil
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel import Accelerator, load_checkpoint_and_dispatch
from accel_bigmodel import init_empty_weights
from accel_state.testing import run_world

SAMPLES = 20
# A slope below this, an iteration, is noise: pages that the allocator keeps or gives back.
KILOBYTES = 2.0


@dataclass(frozen=True)
class Sample:
    """What a process has at a moment."""

    kilobytes: float
    descriptors: int
    threads: int
    processes: int
    files: int

    @staticmethod
    def of(process: psutil.Process, folder: str) -> Sample:
        """Look at a process, and at what is in its directory for temporary files."""
        gc.collect()
        return Sample(
            process.memory_full_info().uss / 1024,
            process.num_fds(),
            process.num_threads(),
            len(process.children(recursive=True)),
            sum(1 for _ in Path(folder).iterdir()),
        )


Scenario = Callable[[Accelerator, Path], Callable[[], object]]


def _prepared(accelerator: Accelerator, workers: int = 0) -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
    data = TensorDataset(torch.randn(64, 16), torch.randint(0, 4, (64,)))
    # Ranks of run_world would start workers in new interpreters, which import this script and torch again.
    context = "fork" if workers else None
    loader = DataLoader(data, batch_size=4, shuffle=True, num_workers=workers, multiprocessing_context=context)
    return accelerator.prepare(model, torch.optim.AdamW(model.parameters()), loader)


def _step(accelerator: Accelerator, model: Any, optimizer: Any, batch: Any) -> None:
    with accelerator.accumulate(model):
        accelerator.backward(nn.functional.cross_entropy(model(batch[0]), batch[1]))
        optimizer.step()
        optimizer.zero_grad()


def steps(accelerator: Accelerator, folder: Path) -> Callable[[], object]:
    """A step of training, a batch from the loader included."""
    model, optimizer, loader = _prepared(accelerator)

    def batches() -> Any:
        while True:
            yield from loader

    endless = batches()
    return lambda: _step(accelerator, model, optimizer, next(endless))


def saves(accelerator: Accelerator, folder: Path) -> Callable[[], object]:
    """A state saved in the background, then one that is waited for."""
    _prepared(accelerator)

    def run() -> None:
        accelerator.save_state(folder / "one", blocking=False)
        accelerator.save_state(folder / "other")

    return run


def loads(accelerator: Accelerator, folder: Path) -> Callable[[], object]:
    """A state loaded."""
    model, optimizer, loader = _prepared(accelerator)
    _step(accelerator, model, optimizer, next(iter(loader)))
    accelerator.save_state(folder / "state")
    return lambda: accelerator.load_state(folder / "state")


def _left(accelerator: Accelerator, workers: int) -> Callable[[], object]:
    _, _, loader = _prepared(accelerator, workers)

    def run() -> None:
        for number, _ in enumerate(loader):
            if number == 1:
                break

    return run


def epochs(accelerator: Accelerator, folder: Path) -> Callable[[], object]:
    """An epoch that is left after its second batch."""
    return _left(accelerator, workers=0)


def worker_epochs(accelerator: Accelerator, folder: Path) -> Callable[[], object]:
    """The same with two workers of the loader."""
    return _left(accelerator, workers=2)


def big_models(accelerator: Accelerator, folder: Path) -> Callable[[], object]:
    """A model loaded with layers on disk, and used once."""
    torch.manual_seed(0)
    make: Callable[[], nn.Module] = lambda: nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])  # noqa: E731
    accelerator.save_model(make(), folder / "weights")
    accelerator.wait_for_everyone()
    offloaded = folder / f"offloaded-{accelerator.process_index}"
    placed: Mapping[str, Any] = {"0": "cpu", "1": "disk", "2": "disk", "3": "cpu"}

    def run() -> None:
        with init_empty_weights():
            model = make()
        loaded = load_checkpoint_and_dispatch(model, folder / "weights", dict(placed), offload_folder=offloaded)
        loaded(torch.ones(1, 64))

    return run


def groups(accelerator: Accelerator, folder: Path) -> Callable[[], object]:
    """A process group of torch, used once and destroyed."""

    def run() -> None:
        group = dist.new_group(backend="gloo")
        dist.all_reduce(torch.ones(1), group=group)
        dist.destroy_process_group(group)

    return run


def sweep(accelerator: Accelerator, folder: Path) -> Callable[[], object]:
    """A new Accelerator that trains, saves in the background and frees its memory, as in a search of parameters."""

    def run() -> None:
        trial = Accelerator(cpu=True)
        model, optimizer, loader = _prepared(trial)
        _step(trial, model, optimizer, next(iter(loader)))
        trial.save_state(folder / "trial", blocking=False)
        trial.free_memory()

    return run


def trackers(accelerator: Accelerator, folder: Path) -> Callable[[], object]:
    """Trackers that are started and not ended before the memory is freed."""

    def run() -> None:
        trial = Accelerator(cpu=True, log_with="jsonl", project_dir=folder)
        trial.init_trackers("soak")
        trial.log({"loss": 1.0}, step=1)
        trial.free_memory()

    return run


SCENARIOS: dict[str, tuple[Scenario, int]] = {
    "steps": (steps, 20_000),
    "saves": (saves, 400),  # two states each
    "loads": (loads, 800),
    "epochs": (epochs, 500),
    "worker_epochs": (worker_epochs, 500),
    "big_models": (big_models, 1_000),
    "groups": (groups, 600),
    "sweep": (sweep, 600),
    "trackers": (trackers, 100),
}


def soak(name: str, iterations: int) -> tuple[list[Sample], float]:
    """What rank 0 has after each part of the iterations, and the seconds that all took."""
    with tempfile.TemporaryDirectory() as temporary:  # of this rank: other processes leave files elsewhere
        tempfile.tempdir = temporary
        accelerator = Accelerator(cpu=True)
        with tempfile.TemporaryDirectory(dir=os.path.dirname(temporary)) as own:
            (folder,) = _shared(accelerator, own)
            run = SCENARIOS[name][0](accelerator, Path(folder))
            found, begin = [], time.perf_counter()
            for number in range(iterations):
                run()
                if (number + 1) % max(iterations // SAMPLES, 1) == 0:
                    accelerator.wait_for_save()
                    found.append(Sample.of(psutil.Process(), temporary))
            took = time.perf_counter() - begin
            accelerator.end_training()
        tempfile.tempdir = None
    return found, took


def _shared(accelerator: Accelerator, folder: str) -> list[str]:
    from accel.utils import broadcast_object_list

    return broadcast_object_list([folder])


def restarts(count: int) -> tuple[list[Sample], float]:
    """What the launcher has after each restart."""
    script = "import sys, time\ntime.sleep(0.3)\nsys.exit(1)\n"
    with tempfile.TemporaryDirectory() as temporary, tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "fails.py")
        path.write_text(script)
        words = ["--cpu", "--num_processes=2", f"--max_restarts={count}", "--monitor_interval=0.1", str(path)]
        begin = time.perf_counter()
        launcher = subprocess.Popen(
            [sys.executable, "-m", "accel_launch", "launch", *words],
            env={**os.environ, "TMPDIR": temporary},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        process, found, known = psutil.Process(launcher.pid), [], set()
        while launcher.poll() is None:
            try:
                children = {child.pid for child in process.children()}
                if len(children) == 2 and children.isdisjoint(known):
                    known |= children
                    found.append(Sample.of(process, temporary))
            except psutil.Error:
                continue
            threading.Event().wait(0.02)
        left = len(list(Path(temporary).iterdir()))
        if left:
            print(f"{left} entries left in the directory for temporary files")
        return found, time.perf_counter() - begin


def killed(count: int) -> tuple[list[Sample], float]:
    """What is left after each of several launchers that are killed."""
    found, left, begin = [], 0, time.perf_counter()
    with tempfile.TemporaryDirectory() as temporary, tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "waits.py")
        path.write_text("import pathlib, sys, time\npathlib.Path(sys.argv[1]).touch()\ntime.sleep(600)\n")
        for number in range(count):
            mark = Path(folder, f"started-{number}")
            words = ["-m", "accel_launch", "launch", "--cpu", "--num_processes=2", str(path), str(mark)]
            launcher = subprocess.Popen([sys.executable, *words], env={**os.environ, "TMPDIR": temporary})
            while not mark.exists():
                if launcher.poll() is not None:
                    raise SystemExit(f"the launcher ended with exit code {launcher.returncode}")
                time.sleep(0.05)
            ranks = psutil.Process(launcher.pid).children(recursive=True)
            launcher.kill()
            launcher.wait()
            alive = psutil.wait_procs(ranks, timeout=10)[1]
            left += len(alive)
            for process in alive:
                process.kill()
            found.append(Sample(0.0, 0, 0, left, sum(1 for _ in Path(temporary).iterdir())))
    return found, time.perf_counter() - begin


LAUNCHERS: dict[str, tuple[Callable[[int], tuple[list[Sample], float]], int]] = {
    "restarts": (restarts, 30),
    "killed": (killed, 20),
}


def slope(found: list[Sample], of: Callable[[Sample], float], iterations: int) -> float:
    """The slope of what was found after the first quarter, for 1,000 iterations.

    It is the median of the slopes between all pairs (Theil-Sen): memory that the allocator gives back later, or a
    thread that is just ending, would tilt a line through all points.
    """
    values = [of(sample) for sample in found[len(found) // 4 :]]
    between = iterations / len(found)
    slopes = [
        (values[later] - values[earlier]) / (later - earlier)
        for later in range(len(values))
        for earlier in range(later)
    ]
    return statistics.median(slopes) / between * 1000 if slopes else 0.0


def memory_slope(found: list[Sample], iterations: int) -> float:
    """Kilobytes for 1,000 iterations."""
    return slope(found, lambda sample: sample.kilobytes, iterations)


def show(label: str, found: list[Sample], iterations: int, took: float, allowed: float = KILOBYTES) -> bool:
    """Print a row; whether nothing grows, except by as many kilobytes an iteration as are allowed."""
    memory = memory_slope(found, iterations)
    others = [
        slope(found, lambda sample, name=name: getattr(sample, name), iterations)  # type: ignore[misc]
        for name in ("descriptors", "threads", "processes", "files")
    ]
    # Less than one in all is a sample of a moment, such as a process that is being started.
    fine = memory / 1000 <= allowed and all(one * iterations / 1000 < 1 for one in others)
    figures = "".join(f"{one:>12,.1f}" for one in (memory, *others))
    print(f"{label:<18}{iterations:>10,}{took:>8.0f}{figures}  {'ok' if fine else 'GROWS'}", flush=True)
    return fine


def main(names: list[str], ranks: list[int], share: float) -> int:
    """Run the scenarios and print a table; 1 if something grows."""
    _measure.heading("For 1,000 iterations")
    titles = ("KB", "descriptors", "threads", "processes", "files")
    print(f"{'scenario':<18}{'iterations':>10}{'s':>8}" + "".join(f"{title:>12}" for title in titles))
    fine = True
    for name in names:
        if name in LAUNCHERS:
            run, times = LAUNCHERS[name]
            found, took = run(max(int(times * share), 4))
            fine &= show(name, found, len(found), took)
            continue
        for count in ranks:
            allowed = KILOBYTES
            if name == "sweep" and count > 1:
                allowed += _row("groups", count, share, math.inf)[1] / 1000
            fine &= _row(name, count, share, allowed)[0]
    return 0 if fine else 1


def _row(name: str, ranks: int, share: float, allowed: float) -> tuple[bool, float]:
    """Run a scenario and print its row; whether nothing grows, and the kilobytes for 1,000 iterations."""
    iterations = max(int(SCENARIOS[name][1] * share) // SAMPLES, 1) * SAMPLES
    found, took = run_world(soak, ranks, name, iterations, timeout=3600)[0]
    fine = show(f"{name}, {ranks} rank{'s' * (ranks > 1)}", found, iterations, took, allowed)
    return fine, memory_slope(found, iterations)


if __name__ == "__main__":
    known = [*(name for name in SCENARIOS if name != "groups"), *LAUNCHERS]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("scenarios", nargs="*", metavar="SCENARIO", help=f"one of {', '.join(known)}; all by default")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="numbers of ranks")
    parser.add_argument("--share", type=float, default=1.0, help="part of the iterations to run")
    chosen = parser.parse_args()
    if unknown := sorted({*chosen.scenarios} - {*known}):
        parser.error(f"no scenario {', '.join(unknown)}. There are: {', '.join(known)}")
    sys.exit(main(chosen.scenarios or known, chosen.ranks, chosen.share))

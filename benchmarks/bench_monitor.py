"""What monitoring costs: microseconds of the loop's thread a step, and the share of a step of 20 ms in all threads.

    python benchmarks/bench_monitor.py

Loop's thread: the same loop of a tiny model with and without ``monitor=True``, a few steps each in turns in a process,
and the mean of the middle half of the differences of the thread's processor time. Between processes, where memory lies
changes a step by more than what is measured. Within one it does so too, but less: several are started, which make the
loops in different orders, and the median counts. The raw loop against itself says what is left of it. The figure needs
a machine that does nothing else: other processes evict the code of the monitor from the caches, as that of the step.
All threads: the same, and the processor time of the monitor's thread, as the kernel counts it, while a model computes
for about 20 ms per step.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator

import _measure

THREAD_TARGET = 5.0
SHARE_TARGET = 1.01
STARTS = 3
TINY = {"width": 4, "depth": 1, "batch_size": 2}
LONG = {"width": 512, "depth": 8, "batch_size": 192}
TURNS = {"tiny": (200, 20), "long": (16, 12)}  # turns, and steps of each
WARM_UP = 4
LOOPS = ("raw", "monitored", "raw again")
STEP_SECONDS = 0.020


def work(start: int, folder: str) -> None:
    """Measure in this process, and report seconds per step."""
    import torch
    from bench_step import parts
    from torch.nn import functional

    from accel import Accelerator
    from accel_monitor.process import scheduled

    torch.set_num_threads(1)
    names = LOOPS[start % len(LOOPS) :] + LOOPS[: start % len(LOOPS)]
    accelerators = {name: Accelerator(cpu=True, monitor=name == "monitored", project_dir=folder) for name in names}

    def loop(name: str, kind: str) -> Iterator[float]:
        """Take the steps of a turn, again and again; yields the processor time of a step."""
        accelerator, (turns, of_turn) = accelerators[name], TURNS[kind]
        sizes = TINY if kind == "tiny" else LONG
        model, optimizer, scheduler, loader = accelerator.prepare(*parts(**sizes, batches=(turns + WARM_UP) * of_turn))
        begin = time.thread_time()
        for step, (inputs, labels) in enumerate(loader, 1):
            with accelerator.accumulate(model):
                accelerator.backward(functional.cross_entropy(model(inputs), labels))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if step % of_turn == 0:
                took = (time.thread_time() - begin) / of_turn
                yield took
                begin = time.thread_time()

    loops = {name: loop(name, "tiny") for name in names}
    times: _measure.Times = {name: [] for name in names}
    gc.disable()  # a garbage collection would be attributed to the turn that is running
    for number in range(-WARM_UP, TURNS["tiny"][0]):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            took = next(loops[name])
            if number >= 0:
                times[name].append(took)
        gc.collect()
    gc.enable()
    (monitor,) = [thread for thread in threading.enumerate() if thread.name == "accel-monitor"]
    assert monitor.native_id is not None
    of_turns = loop("monitored", "long")
    for _ in range(WARM_UP):
        next(of_turns)
    before, began = scheduled(monitor.native_id), time.perf_counter()
    steps = sum(TURNS["long"][1] for _ in of_turns)
    after, seconds = scheduled(monitor.native_id), time.perf_counter() - began
    assert before is not None and after is not None
    more = [middle_half([one - raw for one, raw in zip(times[name], times["raw"], strict=True)]) for name in LOOPS[1:]]
    figures = {"raw": statistics.median(times["raw"]), "cost": more[0], "noise": more[1]}
    _measure.report({**figures, "step": seconds / steps, "thread": (after[0] - before[0]) / seconds})
    for accelerator in accelerators.values():
        accelerator.end_training()


def middle_half(values: list[float]) -> float:
    """The mean without the smallest and the largest quarter."""
    quarter = len(values) // 4
    return statistics.fmean(sorted(values)[quarter : len(values) - quarter])


def main() -> None:
    """Print both figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--start", type=int, help="used internally for the processes")
    arguments = parser.parse_args()
    if arguments.start is not None:
        with tempfile.TemporaryDirectory() as folder:
            work(arguments.start, folder)
        return
    found = [_measure.worker(sys.executable, __file__, f"--start={start}") for start in range(STARTS)]
    raw, cost, noise, step, thread = (
        statistics.median(of_start[name] for of_start in found) for name in ("raw", "cost", "noise", "step", "thread")
    )
    print(
        f"loop's thread: {1e6 * cost:.1f} us per step of {1e6 * raw:.0f} us (the same loop against itself: "
        f"{1e6 * noise:+.1f}), target {THREAD_TARGET:g}: {_measure.verdict(1e6 * cost, THREAD_TARGET)}"
    )
    share = 1 + thread + cost / STEP_SECONDS
    print(
        f"all threads: {share:.4f} of a step of 20 ms, {thread:.2%} of a processor for the monitor's thread (steps of "
        f"{1e3 * step:.0f} ms), target {SHARE_TARGET:g}: {_measure.verdict(share, SHARE_TARGET)}"
    )


if __name__ == "__main__":
    main()

"""What monitoring costs: microseconds of the loop's thread a step, and the share of a step of 20 ms in all threads.

    python benchmarks/bench_monitor.py

The same loop with two Accelerators in one process, one of them with ``monitor=True``. The first model is tiny, so that
its step is mostly overhead; the second one computes for about 20 ms a step.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time

import _measure
import torch
from bench_step import STEPS, parts, prepared_epoch

from accel import Accelerator

THREAD_TARGET = 5.0
SHARE_TARGET = 1.01
ROUNDS = 24
LONG_STEPS = 25
LONG_ROUNDS = 12


def main() -> None:
    """Print both figures."""
    os.environ["ACCELERATE_USE_CPU"] = "true"
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        plain, watched = Accelerator(), Accelerator(monitor=True, project_dir=folder)
        tiny = {"width": 4, "depth": 1, "batches": STEPS, "batch_size": 2}
        long = {"width": 512, "depth": 8, "batches": LONG_STEPS, "batch_size": 192}

        def variants(sizes: dict[str, int]) -> dict:
            return {
                "raw": prepared_epoch(plain, *plain.prepare(*parts(**sizes))),
                "monitored": prepared_epoch(watched, *watched.prepare(*parts(**sizes))),
                "raw again": prepared_epoch(plain, *plain.prepare(*parts(**sizes))),
            }

        thread = _measure.in_turns(variants(tiny), ROUNDS, clock=time.thread_time)
        everything = _measure.in_turns(variants(long), LONG_ROUNDS)
        watched.end_training()
    cost = _measure.extra(thread, "monitored") / STEPS * 1e6
    noise = _measure.extra(thread, "raw again") / STEPS * 1e6
    print(
        f"loop's thread: {cost:.1f} us a step (the same loop against itself: {noise:+.1f}), target {THREAD_TARGET:g}: "
        f"{_measure.verdict(cost, THREAD_TARGET)}"
    )
    step = statistics.median(everything["raw"]) / LONG_STEPS * 1e3
    share, control = _measure.ratio(everything, "monitored"), _measure.ratio(everything, "raw again")
    print(
        f"all threads: {share:.4f} of the CPU time of a step of {step:.0f} ms (against itself: {control:.4f}), target "
        f"{SHARE_TARGET:g}: {_measure.verdict(share, SHARE_TARGET)}"
    )


if __name__ == "__main__":
    main()

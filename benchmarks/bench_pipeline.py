"""Pipelined inference on two processes, relative to stages written directly with torch.distributed.pipelining.

python benchmarks/bench_pipeline.py

The CPU time is that of both processes: on a machine with other work it is less noisy than the time of a batch. Training
is in bench_mesh.py. The reference is not measured: with this schedule it returns a batch of the wrong size.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from collections.abc import Callable

import _measure
import torch
import torch.distributed as dist
from _collectives import counted, on_all_ranks
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

# accel also runs the Python code of the model's forward, tells the other ranks what a batch looks like, broadcasts the
# inputs that they read, and concatenates the chunks.
TARGET = 1.1
WIDTH, BLOCKS, BATCH, CHUNKS = 256, 8, 32, 4
ROUNDS = 15


def blocks() -> list[nn.Module]:
    torch.manual_seed(0)
    return [
        nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        for _ in range(BLOCKS)
    ]


def manual_stages(batch: torch.Tensor) -> Callable[[], torch.Tensor | None]:
    """Half of the blocks on each rank."""
    rank, half = dist.get_rank(), BLOCKS // 2
    part = nn.Sequential(*blocks()[rank * half : (rank + 1) * half]).eval()
    chunk = torch.empty(BATCH // CHUNKS, *batch.shape[1:])
    stage = PipelineStage(part, rank, 2, torch.device("cpu"), input_args=(chunk,), output_args=(chunk.clone(),))
    schedule = ScheduleGPipe(stage, n_microbatches=CHUNKS)

    def run() -> torch.Tensor | None:
        with torch.no_grad():
            return schedule.step(*((batch,) if rank == 0 else ()))

    return run


def work(library: str) -> None:
    """Measure one library in this process, which is one of two ranks."""
    torch.set_num_threads(1)
    accelerator = importlib.import_module(library).Accelerator(cpu=True)
    batch = torch.randn(BATCH, 64, WIDTH, generator=torch.Generator().manual_seed(1))
    prepare = importlib.import_module(f"{library}.inference").prepare_pippy
    example = (batch[: BATCH // CHUNKS],)
    model = prepare(
        nn.Sequential(*blocks()).eval(), split_points=[str(BLOCKS // 2)], example_args=example, num_chunks=CHUNKS
    )
    raw = manual_stages(batch)

    def prepared() -> torch.Tensor | None:
        with torch.no_grad():
            return model(batch)

    for _ in range(2):
        ours, plain = prepared(), raw()
    if plain is not None:
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-5)
    steps = {"raw": raw, "prepared": prepared}
    sent = {name: counted(step) for name, step in steps.items()}
    times = _measure.in_turns(steps, ROUNDS, clock=time.perf_counter)
    processor = on_all_ranks(_measure.in_turns(steps, ROUNDS, clock=time.process_time))
    if accelerator.is_main_process:
        _measure.report(
            {
                "raw": sorted(times["raw"])[ROUNDS // 2] * 1e3,
                "ratio": _measure.ratio(times, "prepared"),
                "processor": _measure.ratio(processor, "prepared"),
                **{f"{name}_calls": item.calls for name, item in sent.items()},
                **{f"{name}_bytes": item.sent for name, item in sent.items()},
            }
        )
    accelerator.end_training()


def main() -> None:
    """Print the table and compare the figure with the target."""
    figures = _measure.worker(sys.executable, __file__, "--library", "accel", processes=2)
    _measure.heading(f"A batch of {BATCH} in {CHUNKS} chunks through {BLOCKS} blocks on two processes")
    _measure.row("torch.distributed.pipelining", f"{figures['raw']:.0f} ms")
    for label, name in (("", "raw"), ("accel", "prepared")):
        _measure.row(label, f"{figures[f'{name}_calls']:.0f} messages, {figures[f'{name}_bytes'] / 1e6:.2f} MB sent")
    for label, name in (("time", "ratio"), ("CPU time", "processor")):
        _measure.row(
            f"accel, {label} relative to that",
            f"{figures[name]:.3f} x",
            f"target: at most {TARGET:.2f}: {_measure.verdict(figures[name], TARGET)}",
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--library", help="measure this library in this process (used internally for the worker processes)"
    )
    chosen = parser.parse_args().library
    work(chosen) if chosen else main()

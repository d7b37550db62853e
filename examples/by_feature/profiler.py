"""Profile a few steps: time and memory of each operator, FLOPs, and a trace for each rank.

    python examples/by_feature/profiler.py --output_dir runs/profiler

The schedule skips one step, warms up for one, and records two. Open the traces with https://ui.perfetto.dev.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from common import digit_loaders, digit_model
from torch.nn import functional

from accel import Accelerator, ProfileKwargs
from accel.utils import set_seed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output_dir", default="runs/profiler", help="default: runs/profiler")
    folder = parser.parse_args().output_dir
    settings = ProfileKwargs(
        activities=["cpu"] if not torch.cuda.is_available() else ["cpu", "cuda"],
        schedule_option={"skip_first": 1, "wait": 0, "warmup": 1, "active": 2, "repeat": 1},
        record_shapes=True,
        profile_memory=True,
        with_flops=True,
        output_trace_dir=folder,
    )
    accelerator = Accelerator(kwargs_handlers=[settings])
    set_seed(0)
    loader, _ = digit_loaders()
    model = digit_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    with accelerator.profile() as profiler:
        for step, (images, labels) in enumerate(loader):
            accelerator.backward(functional.cross_entropy(model(images), labels))
            optimizer.step()
            optimizer.zero_grad()
            profiler.step()
            if step == 4:
                break
    events = profiler.key_averages()
    accelerator.print(events.table(sort_by="self_cpu_memory_usage", row_limit=5))
    accelerator.print("traces:", *sorted(path.name for path in Path(folder).glob("*.json")))
    accelerator.print(f"FLOPs of the recorded steps: {sum(event.flops for event in events)}")
    accelerator.end_training()


if __name__ == "__main__":
    main()

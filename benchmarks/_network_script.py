"""The training of network_faults.py: a few numbers, an all-reduce each step, and a state that is saved and continued.

_network_script.py FOLDER STEPS SECONDS [TIMEOUT]    seconds of a step; of the process group, or its default
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist


def train(where: str, steps: int, seconds: float, **limit: timedelta) -> None:
    """Train, and write the digest of the final weights."""
    folder = Path(where)
    dist.init_process_group("gloo", **limit)
    rank, size = dist.get_rank(), dist.get_world_size()
    # Each machine has a folder of its own: only rank 0 saves, and tells the others at a start.
    state = folder / "state.pt"
    weight, first = torch.ones(64, dtype=torch.float64), torch.zeros(1, dtype=torch.int64)
    if rank == 0 and state.exists():
        weight, first = torch.load(state)
    for tensor in (weight, first):
        dist.broadcast(tensor, 0)
    for step in range(int(first), steps):
        gradient = (weight - (rank + 1)) * torch.arange(64) / 64
        dist.all_reduce(gradient)
        weight = weight - 0.01 * gradient / size
        if rank == 0:
            torch.save((weight, torch.tensor([step + 1])), state.with_suffix(".part"))
            os.replace(state.with_suffix(".part"), state)
            (folder / "steps").write_text(str(step + 1))
        time.sleep(seconds)
    dist.barrier()
    if rank == 0:
        digest = hashlib.sha256(weight.numpy().tobytes()).hexdigest()
        (folder / "digest").write_text(f"{digest} {steps} steps {size} ranks")
    dist.destroy_process_group()


def main() -> None:
    """Train as the command line says."""
    limit = {"timeout": timedelta(seconds=float(sys.argv[4]))} if len(sys.argv) > 4 else {}
    train(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), **limit)


if __name__ == "__main__":
    main()

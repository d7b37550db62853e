"""The training script of kill_replicas.py: each process writes what it computes to a file of its own.

A line is [kind, step, shard size, sample ids, loss, seconds]; "dealt" before a step is voted on, "done" after it was
applied.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel import Accelerator, DataLoaderConfiguration, ProjectConfiguration

SAMPLES = 8000
BATCH = 8
SEED = 20


class Records:
    """A file of lines, one per event; what was written survives the process."""

    def __init__(self, folder: Path, number: str) -> None:
        path = folder / f"{number}.{os.environ.get('ACCELERATE_FT_RESTARTS', '0')}.{os.getpid()}.jsonl"
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(self, *event: object) -> None:
        os.write(self._file, (json.dumps([*event, time.time()]) + "\n").encode())


def main() -> None:
    folder, steps, width, save_every, pause = Path(sys.argv[1]), *map(int, sys.argv[2:5]), float(sys.argv[5])
    torch.manual_seed(SEED)
    project = ProjectConfiguration(str(folder / "states"), automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(
        cpu=True,
        project_config=project if save_every else None,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=SEED),
    )
    number = os.environ.get("ACCELERATE_FT_REPLICA") or str(accelerator.process_index)
    records = Records(folder, number)
    records.write("start", os.getpid(), number)
    x = torch.randn(SAMPLES, 64, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(x, (x.sum(1) > 0).long(), torch.arange(SAMPLES))
    model = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(data, batch_size=BATCH, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if save_every or "ACCELERATE_FT" in os.environ:
        accelerator.resume()
    records.write("joined", optimizer.steps_taken)
    while optimizer.steps_taken < steps:
        for inputs, labels, ids in loader:
            with accelerator.accumulate(model):
                step = optimizer.steps_taken
                loss = nn.functional.cross_entropy(model(inputs), labels)
                accelerator.backward(loss)
                records.write("dealt", step, ids.tolist(), loss.item())
                if accelerator.sync_gradients:
                    time.sleep(pause)
                optimizer.step()
                optimizer.zero_grad()
            if optimizer.steps_taken > step:
                records.write("done", step)
                if save_every and optimizer.steps_taken % save_every == 0:
                    accelerator.save_state()
            if optimizer.steps_taken >= steps:
                break
    weights = b"".join(tensor.numpy().tobytes() for tensor in accelerator.unwrap_model(model).state_dict().values())
    records.write("end", hashlib.sha256(weights).hexdigest())
    accelerator.end_training()


if __name__ == "__main__":
    main()

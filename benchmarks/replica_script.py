"""The training script of kill_replicas.py and machines_come_and_go.py.

Each process writes what it computes to a file of its own.

A line is [kind, step, sample ids, loss, seconds]; "computed" before a step is voted on, "done" after it was applied.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel import Accelerator, DataLoaderConfiguration, ProjectConfiguration
from accel.utils import broadcast_object_list

SEED = 20


@dataclass
class Settings:
    """What the harness passes as JSON."""

    folder: str
    steps: int
    width: int = 64
    batch: int = 8
    samples: int = 8000
    save_every: int = 0
    logical_shards: int = 0  # of an elastic loader; 0 for a loader of another kind


class Records:
    """A file of lines, one per event; what was written survives the process."""

    def __init__(self, folder: Path, number: str) -> None:
        path = folder / f"{number}.{os.environ.get('ACCELERATE_FT_RESTARTS', '0')}.{os.getpid()}.jsonl"
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(self, *event: object) -> None:
        os.write(self._file, (json.dumps([*event, time.time()]) + "\n").encode())


class Pace:
    """Makes steps as long as the harness asks for at this moment, in the file "pace"."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "pace"
        self._began = time.monotonic()

    def begin(self) -> None:
        self._began = time.monotonic()

    def wait(self, part: float) -> None:
        """Wait until this part of the step is over."""
        while time.monotonic() - self._began < part * float(self._file.read_text()):
            time.sleep(0.02)


def data_config(settings: Settings) -> DataLoaderConfiguration:
    """An elastic loader, or one whose order is drawn from the seed."""
    if settings.logical_shards:
        return DataLoaderConfiguration(elastic=True, logical_shards=settings.logical_shards, data_seed=SEED)
    return DataLoaderConfiguration(use_seedable_sampler=True, data_seed=SEED)


def main() -> None:
    settings = Settings(**json.loads(sys.argv[1]))
    folder, steps, save_every = Path(settings.folder), settings.steps, settings.save_every
    shards = settings.logical_shards
    torch.manual_seed(SEED)
    project = ProjectConfiguration(str(folder / "states"), automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(
        cpu=True,
        project_config=project if save_every else None,
        project_dir=None if save_every or not os.environ.get("ACCELERATE_MONITOR") else folder / "states",
        dataloader_config=data_config(settings),
        deterministic_reduction=bool(shards),
        save_on_signal=bool(shards),
    )
    number = os.environ.get("ACCELERATE_FT_REPLICA") or str(accelerator.process_index)
    records, pace = Records(folder, number), Pace(folder)
    # The same for all processes of a start.
    (start,) = broadcast_object_list([uuid.uuid4().hex])
    records.write("start", os.getpid(), number, start, accelerator.num_processes)
    x = torch.randn(settings.samples, 64, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(x, (x.sum(1) > 0).long(), torch.arange(settings.samples))
    width = settings.width
    hidden = (nn.Linear(64, width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, width), nn.ReLU())
    model = nn.Sequential(*hidden, nn.Linear(width, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(data, batch_size=settings.batch * (shards or 1), shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if save_every or "ACCELERATE_FT" in os.environ:
        accelerator.resume()
    records.write("joined", optimizer.steps_taken)
    while optimizer.steps_taken < steps:
        for inputs, labels, ids in loader:
            step = optimizer.steps_taken
            counts = not shards or loader.logical_shard.weight > 0
            if not shards or loader.logical_shard.slot == 0:
                pace.begin()
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(inputs), labels)
                if counts:
                    records.write("computed", step, ids.tolist(), loss.item())
                pace.wait(0.7)  # a replica that is killed here aborts the step for all
                accelerator.backward(loss)
                pace.wait(1.0)  # and here the others have its gradients
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

"""Train on replicas that may be killed at any moment, with the same result as if none had been.

    accel launch --cpu --ft --num_replicas 2 examples/elastic.py
    accel launch --cpu --ft --num_replicas 2 examples/elastic.py --kill_at 100

Both print the same sha256 of the weights. In the second run replica 1 kills itself with SIGKILL at step 100: replica 0
continues alone with the whole global batch, and replica 1 is started again and takes its share back.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import time

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel import Accelerator


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--kill_at", type=int, metavar="STEP", help="replica 1 kills itself once, at this step")
    parser.add_argument("--pause", type=float, default=0.05, metavar="SECONDS", help="length of a step, at least")
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    torch.manual_seed(0)
    accelerator = Accelerator()
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels))
    model = nn.Sequential(nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)
    loader = DataLoader(data, batch_size=16, shuffle=True)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    # Returns the same objects; to type checkers they now have `iteration` and `steps_taken`.
    loader, optimizer = accelerator.prepare_data_loader(loader), accelerator.prepare_optimizer(optimizer)

    # A replica that was restarted gets the state of another one, and continues in the epoch of the others.
    accelerator.resume()
    for _ in range(loader.iteration, arguments.epochs):
        for x, y in loader:
            if optimizer.steps_taken == arguments.kill_at and is_first_start_of_replica(1):
                os.kill(os.getpid(), signal.SIGKILL)
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(x), y)
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            time.sleep(arguments.pause)

    weights = b"".join(tensor.cpu().numpy().tobytes() for tensor in model.state_dict().values())
    accelerator.print(f"{optimizer.steps_taken} steps, sha256 {hashlib.sha256(weights).hexdigest()[:16]}")
    accelerator.end_training()


def is_first_start_of_replica(number: int) -> bool:
    """Whether this process is the replica with that number, and was not restarted."""
    return [os.environ.get(f"ACCELERATE_FT_{name}") for name in ("REPLICA", "RESTARTS")] == [str(number), "0"]


if __name__ == "__main__":
    main()

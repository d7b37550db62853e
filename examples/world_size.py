"""Train on any number of processes to the same weights, bit by bit: a convolutional network on augmented digits.

    python examples/world_size.py
    accel launch --cpu --num_processes 3 examples/world_size.py

Both print the same sha256. So does a run that is killed and started again on another number of processes:

    accel launch --cpu --num_processes 4 examples/world_size.py --output_dir runs/world_size --die_after 54
    accel launch --cpu --num_processes 3 examples/world_size.py --output_dir runs/world_size

and one on machines that come and go, which share the directory:

    accel launch --cpu --num_machines 2:8 --main_process_ip 10.77.0.1 examples/world_size.py --output_dir runs

The batch size is the global one. Each global batch is computed in logical shards, whose gradients are added in an order
that depends on their number only; all random numbers, of augmentation in the workers and of dropout in the model too,
depend on the seed, the epoch and the position in it.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import signal
from collections.abc import Sequence

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from accel import Accelerator, DataLoaderConfiguration, ProjectConfiguration
from accel.utils import set_seed


class AugmentedDigits(Dataset):
    """Scikit-learn's 1797 scans of 8x8 pixels, shifted by up to a pixel and with noise."""

    def __init__(self) -> None:
        images, labels = load_digits(return_X_y=True)
        self.images = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
        self.labels = torch.tensor(labels)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        shifts = random.randint(-1, 1), random.randint(-1, 1)
        image = torch.roll(self.images[index], shifts, dims=(1, 2))
        return image + 0.1 * torch.randn_like(image), self.labels[index]


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(16 * 4 * 4, 10),
    )


def sha256(weights: dict[str, torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(name.encode() + weights[name].cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def train(arguments: argparse.Namespace) -> None:
    accelerator = Accelerator(
        dataloader_config=DataLoaderConfiguration(
            elastic=True, logical_shards=arguments.logical_shards, data_seed=arguments.seed
        ),
        deterministic_reduction=True,
        project_config=ProjectConfiguration(
            arguments.output_dir or None, automatic_checkpoint_naming=bool(arguments.output_dir), total_limit=2
        ),
        save_on_signal=bool(arguments.output_dir),
    )
    set_seed(arguments.seed)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = DataLoader(AugmentedDigits(), batch_size=64, shuffle=True, num_workers=arguments.workers)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    # Returns the same objects; to type checkers they now have `iteration` and `steps_taken`.
    loader, optimizer = accelerator.prepare_data_loader(loader), accelerator.prepare_optimizer(optimizer)
    loss_of_step = torch.zeros((), device=accelerator.device)
    if arguments.output_dir and accelerator.resume():
        accelerator.print(f"resuming in epoch {loader.iteration} after {optimizer.steps_taken} optimizer steps")

    for epoch in range(loader.iteration, arguments.epochs):
        for images, labels in loader:
            loss = functional.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            # Each batch is a logical shard, and its weight its part of the global batch.
            shard = loader.logical_shard
            loss_of_step = loss.detach() * shard.weight + (loss_of_step if shard.slot else 0)
            if accelerator.sync_gradients and arguments.output_dir and optimizer.steps_taken % 10 == 0:
                accelerator.save_state()
            if optimizer.steps_taken == arguments.die_after:
                os.kill(os.getpid(), signal.SIGKILL)
        accelerator.print(f"epoch {epoch}: loss of the last step {accelerator.reduce(loss_of_step).item():.4f}")

    weights = accelerator.get_state_dict(model)
    accelerator.print(f"{accelerator.num_processes} ranks, sha256 {sha256(weights)}")
    accelerator.end_training()


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=3, help="epochs (default 3)")
    parser.add_argument("--seed", type=int, default=0, help="random seed (default 0)")
    parser.add_argument("--workers", type=int, default=0, help="workers of each process's loader (default 0)")
    parser.add_argument(
        "--logical_shards", type=int, default=8, help="parts that each global batch is computed in (default 8)"
    )
    parser.add_argument("--output_dir", default="", help="where to save states every 10 optimizer steps, and to resume")
    parser.add_argument("--die_after", type=int, help="kill the process after that many optimizer steps")
    return parser.parse_args(argv)


if __name__ == "__main__":
    train(parse())

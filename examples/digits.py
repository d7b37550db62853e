"""Train a small convolutional network on scikit-learn's handwritten digits: 1797 scans of 8x8 pixels.

    python examples/digits.py
    accel launch --cpu --num_processes 2 --mixed_precision bf16 examples/digits.py
    torchrun --nproc_per_node 2 examples/digits.py

`--batch_size` is that of all processes together, so every number of processes sees the same batches and learns the same
weights.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from accel import Accelerator, DataLoaderConfiguration
from accel.utils import set_seed, tqdm

CLASSES = 10
TEST_SAMPLES = 360


class DigitsNet(nn.Module):
    """Two convolutions and two linear layers: images of shape (N, 1, 8, 8) to logits of shape (N, 10)."""

    def __init__(self) -> None:
        super().__init__()
        # Smooth functions throughout: a ReLU or a maximum that flips on a rounding error would let runs drift apart.
        self.convolutions = nn.Sequential(
            nn.Conv2d(1, 16, kernel_size=3, padding=1),
            nn.GELU(),
            nn.Conv2d(16, 32, kernel_size=3, padding=1),
            nn.GELU(),
            nn.AvgPool2d(2),
        )
        self.classifier = nn.Sequential(nn.Flatten(), nn.Linear(32 * 4 * 4, 64), nn.GELU(), nn.Linear(64, CLASSES))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.convolutions(images))


def digits() -> tuple[TensorDataset, TensorDataset]:
    """1437 scans to train on and 360 to test on: always the same ones, with as many of each digit in both as there are
    in all.
    """
    images, labels = load_digits(return_X_y=True)
    train_images, test_images, train_labels, test_labels = train_test_split(
        torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8),
        torch.tensor(labels, dtype=torch.int64),
        test_size=TEST_SAMPLES,
        stratify=labels,
        random_state=0,
    )
    mean, deviation = train_images.mean(), train_images.std()
    train_images, test_images = (train_images - mean) / deviation, (test_images - mean) / deviation
    return TensorDataset(train_images, train_labels), TensorDataset(test_images, test_labels)


def evaluate(accelerator: Accelerator, model: nn.Module, loader: DataLoader) -> tuple[float, int]:
    """The share of right answers, and the number of samples that it was measured on."""
    model.eval()
    right, samples = 0, 0
    for images, labels in loader:
        with torch.no_grad():
            answers = model(images).argmax(dim=1)
        # Each process has a part of the batch; together they have each sample of the data set once.
        answers, labels = accelerator.gather_for_metrics((answers, labels))
        right += int((answers == labels).sum())
        samples += len(labels)
    return right / samples, samples


def train(arguments: argparse.Namespace) -> None:
    accelerator = Accelerator(
        gradient_accumulation_steps=arguments.gradient_accumulation_steps,
        dataloader_config=DataLoaderConfiguration(
            split_batches=True, use_seedable_sampler=True, data_seed=arguments.seed
        ),
    )
    set_seed(arguments.seed)

    train_set, test_set = digits()
    train_loader = DataLoader(train_set, batch_size=arguments.batch_size, shuffle=True, drop_last=True)
    test_loader = DataLoader(test_set, batch_size=arguments.batch_size)

    model = DigitsNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=arguments.lr, momentum=0.9, nesterov=True, weight_decay=1e-3)
    updates_an_epoch = -(-len(train_loader) // accelerator.gradient_accumulation_steps)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=arguments.lr, total_steps=arguments.epochs * updates_an_epoch
    )

    model, optimizer, scheduler, train_loader, test_loader = accelerator.prepare(
        model, optimizer, scheduler, train_loader, test_loader
    )

    loss_of_epoch = torch.zeros((), device=accelerator.device)
    progress = tqdm(total=arguments.epochs * len(train_loader), desc="training", unit="batch")  # on the main process
    for _ in range(arguments.epochs):
        model.train()
        loss_of_epoch.zero_()
        for images, labels in train_loader:
            with accelerator.accumulate(model):
                loss = functional.cross_entropy(model(images), labels, label_smoothing=0.1)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            loss_of_epoch += loss.detach()
            progress.update()
        mean_loss = accelerator.reduce(loss_of_epoch / len(train_loader), reduction="mean").item()
        progress.set_postfix(loss=f"{mean_loss:.4f}")
    progress.close()

    accuracy, samples = evaluate(accelerator, model, test_loader)
    if arguments.output_dir:
        accelerator.save_model(model, arguments.output_dir)
        accelerator.print(f"weights: {arguments.output_dir}/model.safetensors")
    accelerator.print(f"training loss of the last epoch: {mean_loss:.6f}")
    accelerator.print(f"test accuracy: {accuracy:.3f} on {samples} samples")
    accelerator.end_training()


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=15, help="passes over the training set (default 15)")
    parser.add_argument(
        "--batch_size", type=int, default=32, help="samples in a batch, over all processes together (default 32)"
    )
    parser.add_argument(
        "--gradient_accumulation_steps", type=int, default=2, help="batches to an optimizer step (default 2)"
    )
    parser.add_argument("--lr", type=float, default=0.2, help="highest learning rate of the schedule (default 0.2)")
    parser.add_argument(
        "--seed", type=int, default=0, help="of the weights and of the order of the samples (default 0)"
    )
    parser.add_argument(
        "--output_dir", default="runs/digits", help="where to save the weights; '' for nowhere (default runs/digits)"
    )
    arguments = parser.parse_args(words)
    if arguments.epochs < 1:
        parser.error(f"--epochs {arguments.epochs}: give at least 1")
    return arguments


if __name__ == "__main__":
    train(parse())

"""Train a small convolutional network on scikit-learn's handwritten digits: 1797 scans of 8x8 pixels.

    python examples/digits.py
    accel launch --cpu --num_processes 2 --mixed_precision bf16 examples/digits.py
    torchrun --nproc_per_node 2 examples/digits.py

`--batch_size` is the global batch size, so any number of processes trains on the same batches to the same weights.
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
        # Only smooth functions: rounding errors would make runs with ReLU or max pooling diverge.
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
    """1437 scans for training and 360 for testing: a fixed, stratified split."""
    images, labels = load_digits(return_X_y=True)
    parts = train_test_split(
        torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8),
        torch.tensor(labels, dtype=torch.int64),
        test_size=TEST_SAMPLES,
        stratify=labels,
        random_state=0,
    )
    train_images, test_images, train_labels, test_labels = map(torch.as_tensor, parts)
    mean, deviation = train_images.mean(), train_images.std()
    train_images, test_images = (train_images - mean) / deviation, (test_images - mean) / deviation
    return TensorDataset(train_images, train_labels), TensorDataset(test_images, test_labels)


def evaluate(accelerator: Accelerator, model: nn.Module, loader: DataLoader) -> tuple[float, int]:
    """The accuracy, and the number of samples."""
    model.eval()
    correct, samples = 0, 0
    for images, labels in loader:
        with torch.no_grad():
            predictions = model(images).argmax(dim=1)
        # Each process has a part of the batch; the gathered parts contain each sample once.
        predictions, labels = accelerator.gather_for_metrics((predictions, labels))
        correct += int((predictions == labels).sum())
        samples += len(labels)
    return correct / samples, samples


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
    steps_per_epoch = -(-len(train_loader) // accelerator.gradient_accumulation_steps)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=arguments.lr, total_steps=arguments.epochs * steps_per_epoch
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


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=15, help="epochs (default 15)")
    parser.add_argument("--batch_size", type=int, default=32, help="global batch size (default 32)")
    parser.add_argument(
        "--gradient_accumulation_steps", type=int, default=2, help="batches per optimizer step (default 2)"
    )
    parser.add_argument("--lr", type=float, default=0.2, help="peak learning rate (default 0.2)")
    parser.add_argument("--seed", type=int, default=0, help="random seed (default 0)")
    parser.add_argument(
        "--output_dir",
        default="runs/digits",
        help="where to save the weights; '' does not save them (default runs/digits)",
    )
    arguments = parser.parse_args(argv)
    if arguments.epochs < 1:
        parser.error(f"--epochs {arguments.epochs}: must be at least 1")
    return arguments


if __name__ == "__main__":
    train(parse())

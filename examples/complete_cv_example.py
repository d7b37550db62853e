"""A complete image classification run: everything that a training script for a cluster needs.

    accel launch --cpu --num_processes 2 examples/complete_cv_example.py --output_dir runs/cv
    accel launch --cpu --num_processes 2 --mixed_precision bf16 examples/complete_cv_example.py --output_dir runs/cv16

Mixed precision, gradient accumulation, clipping, a learning rate schedule, augmentation in worker processes, metrics
over all ranks, trackers, early stopping, checkpoints, resuming after any interruption, and exported weights. Start the
same command again to resume. The images are scikit-learn's handwritten digits.
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from accel import Accelerator, ProjectConfiguration
from accel.logging import get_logger
from accel.utils import set_seed, tqdm

logger = get_logger(__name__, log_level="INFO")


class Digits(Dataset):
    """Scans of 8x8 pixels; those for training are shifted by up to one pixel."""

    def __init__(self, train: bool) -> None:
        images, labels = load_digits(return_X_y=True)
        part = slice(0, 1437) if train else slice(1437, None)
        self.images = torch.tensor(images[part] / 16, dtype=torch.float32).reshape(-1, 1, 8, 8)
        self.labels = torch.tensor(labels[part])
        self.train = train

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        image = self.images[index]
        if self.train:
            image = image.roll(int(torch.randint(-1, 2, ())), dims=2)
        return image, self.labels[index]


def evaluate(accelerator: Accelerator, model: nn.Module, loader: DataLoader) -> float:
    model.eval()
    correct = total = 0
    for images, labels in loader:
        with torch.no_grad():
            predictions = model(images).argmax(dim=1)
        predictions, labels = accelerator.gather_for_metrics((predictions, labels))
        correct += int((predictions == labels).sum())
        total += len(labels)
    return correct / total


def train(options: argparse.Namespace) -> None:
    accelerator = Accelerator(
        gradient_accumulation_steps=options.gradient_accumulation_steps,
        log_with=options.log_with,
        project_config=ProjectConfiguration(options.output_dir, automatic_checkpoint_naming=True, total_limit=2),
        save_on_signal=True,  # SIGTERM or SIGUSR1 saves, and exits with code 75
    )
    set_seed(options.seed, device_specific=True)
    accelerator.init_trackers("digits", config=vars(options))

    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.GELU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.GELU(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(512, 10),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    loader = DataLoader(Digits(train=True), options.batch_size, shuffle=True, num_workers=options.num_workers)
    test_loader = DataLoader(Digits(train=False), batch_size=60)
    # In batches of one process: a prepared scheduler steps once for each process.
    total_steps = options.epochs * len(loader) // options.gradient_accumulation_steps
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=total_steps)
    model, optimizer, scheduler, loader, test_loader = accelerator.prepare(
        model, optimizer, scheduler, loader, test_loader
    )
    # Returns the same objects; to type checkers they now have `iteration` and `steps_taken`.
    loader, optimizer = accelerator.prepare_data_loader(loader), accelerator.prepare_optimizer(optimizer)

    if accelerator.resume():
        logger.info(f"resuming in epoch {loader.iteration} after {optimizer.steps_taken} optimizer steps")
    for epoch in range(loader.iteration, options.epochs):
        model.train()
        for images, labels in tqdm(loader, desc=f"epoch {epoch}"):
            with accelerator.accumulate(model):
                loss = functional.cross_entropy(model(images), labels)
                accelerator.backward(loss)
                norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                step = optimizer.steps_taken
                accelerator.log({"loss": loss.detach(), "norm": norm, "lr": scheduler.get_last_lr()[0]}, step=step)
                if step % options.save_every == 0:
                    accelerator.save_state()
        accuracy = evaluate(accelerator, model, test_loader)
        accelerator.log({"accuracy": accuracy, "epoch": epoch}, step=optimizer.steps_taken)
        accelerator.print(f"epoch {epoch}: accuracy {accuracy:.3f}")
        if accuracy >= options.target:
            accelerator.set_trigger()
        if accelerator.check_trigger():
            break

    accelerator.save_model(model, f"{options.output_dir}/final")
    accelerator.end_training()
    accelerator.print(f"accuracy: {accuracy:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output_dir", default="runs/cv", help="default: runs/cv")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch_size", type=int, default=16, help="per process")
    parser.add_argument("--gradient_accumulation_steps", type=int, default=2)
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num_workers", type=int, default=0)
    parser.add_argument("--save_every", type=int, default=40, help="optimizer steps between checkpoints")
    parser.add_argument("--target", type=float, default=0.97, help="stop at this accuracy")
    parser.add_argument("--log_with", nargs="*", default=["jsonl"], help="trackers, or all (default: jsonl)")
    train(parser.parse_args())


if __name__ == "__main__":
    main()

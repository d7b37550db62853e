"""Train on scikit-learn's handwritten digits, and resume exactly after any interruption.

    accel launch --cpu --num_processes 2 examples/resume.py --output_dir runs/resume

Kill it at any time (`kill -9`, a power cut, the time limit of a SLURM job) and start the same command again: the final
weights are bit-identical. This takes `save_state` every few steps, `resume` at the start, and a loop that starts at the
loader's epoch. On SIGTERM and SIGUSR1 the run saves immediately and exits with code 75, upon which
`accel launch --max_restarts 1` restarts it, or a SLURM script requeues the job. The random numbers of dropout and of
data augmentation in worker processes continue exactly.
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Sequence

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from accel import Accelerator, ProjectConfiguration
from accel.utils import set_seed


class NoisyDigits(Dataset):
    """1437 scans of 8x8 pixels, with random noise and shifts of up to one pixel."""

    def __init__(self) -> None:
        images, labels = load_digits(return_X_y=True)
        self.images = torch.tensor(images[:1437] / 16, dtype=torch.float32).reshape(-1, 8, 8)
        self.labels = torch.tensor(labels[:1437])

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        shift = int(torch.randint(-1, 2, ()))
        image = self.images[index].roll(shift, dims=1) + 0.1 * torch.randn(8, 8)
        return image.flatten(), self.labels[index]


class TestDigits(Dataset):
    """The other 360 scans, without augmentation."""

    def __init__(self) -> None:
        images, labels = load_digits(return_X_y=True)
        self.images = torch.tensor(images[1437:] / 16, dtype=torch.float32)
        self.labels = torch.tensor(labels[1437:])

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.images[index], self.labels[index]


def evaluate(accelerator: Accelerator, model: nn.Module, loader: DataLoader) -> float:
    """The accuracy."""
    model.eval()
    correct = samples = 0
    with torch.no_grad():
        for images, labels in loader:
            predictions, labels = accelerator.gather_for_metrics((model(images).argmax(dim=1), labels))
            correct += int((predictions == labels).sum())
            samples += len(labels)
    return correct / samples


def train(arguments: argparse.Namespace) -> None:
    project = ProjectConfiguration(
        project_dir=arguments.output_dir,
        automatic_checkpoint_naming=True,
        total_limit=2,
        upload_to=arguments.upload_to,
    )
    accelerator = Accelerator(project_config=project, gradient_accumulation_steps=2, save_on_signal=True)
    set_seed(arguments.seed, device_specific=True)

    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Dropout(0.2), nn.Linear(128, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=arguments.epochs * 90)
    loader = DataLoader(NoisyDigits(), batch_size=16, shuffle=True, num_workers=arguments.num_workers)
    test_loader = DataLoader(TestDigits(), batch_size=60)
    model, optimizer, scheduler, loader, test_loader = accelerator.prepare(
        model, optimizer, scheduler, loader, test_loader
    )
    # Returns the same objects; to type checkers they now have `iteration` and `steps_taken`.
    loader, optimizer = accelerator.prepare_data_loader(loader), accelerator.prepare_optimizer(optimizer)

    if accelerator.resume():
        accelerator.print(f"resuming in epoch {loader.iteration} after {optimizer.steps_taken} optimizer steps")
    for epoch in range(loader.iteration, arguments.epochs):
        model.train()
        for images, labels in loader:
            with accelerator.accumulate(model):
                accelerator.backward(functional.cross_entropy(model(images), labels))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if optimizer.steps_taken % arguments.save_every == 0 and accelerator.sync_gradients:
                accelerator.save_state()
        accelerator.print(f"epoch {epoch}: accuracy {evaluate(accelerator, model, test_loader):.3f}")

    accelerator.save_model(model, f"{arguments.output_dir}/final")
    weights = b"".join(
        parameter.detach().cpu().numpy().tobytes() for parameter in accelerator.unwrap_model(model).parameters()
    )
    accelerator.print(f"weights: sha256 {hashlib.sha256(weights).hexdigest()[:16]}")
    accelerator.end_training()


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--output_dir", default="runs/resume", help="directory of the checkpoints and the final weights"
    )
    parser.add_argument("--upload_to", help="URL of a store, such as s3://bucket/run, to copy the checkpoints to")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--save_every", type=int, default=10, help="optimizer steps between checkpoints")
    parser.add_argument("--num_workers", type=int, default=2, help="data loader workers per process")
    parser.add_argument("--seed", type=int, default=0)
    train(parser.parse_args(argv))


if __name__ == "__main__":
    main()

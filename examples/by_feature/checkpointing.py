"""Save the state of a run, and continue from it with the same numbers.

    accel launch --cpu --num_processes 2 examples/by_feature/checkpointing.py --output_dir runs/checkpointing

The script trains three epochs and saves after each and in the middle of the second. Then it loads the checkpoint of the
middle, trains to the end again, and compares the weights. `resume.py` shows the shorter form for real runs.
"""

from __future__ import annotations

import argparse

import torch
from common import digit_loaders, digit_model, evaluate
from torch.nn import functional

from accel import Accelerator, ProjectConfiguration
from accel.utils import set_seed

EPOCHS, MIDDLE = 3, 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output_dir", default="runs/checkpointing", help="default: runs/checkpointing")
    folder = parser.parse_args().output_dir
    accelerator = Accelerator(project_config=ProjectConfiguration(folder))
    set_seed(0)
    train_loader, test_loader = digit_loaders()
    model = digit_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=EPOCHS * len(train_loader))
    model, optimizer, scheduler, train_loader, test_loader = accelerator.prepare(
        model, optimizer, scheduler, train_loader, test_loader
    )
    train_loader = accelerator.prepare_data_loader(train_loader)  # the same; to type checkers it now has `iteration`

    def train(save: bool) -> torch.Tensor:
        # train_loader.iteration is 0 at the start, and the epoch of the checkpoint after load_state.
        for epoch in range(train_loader.iteration, EPOCHS):
            for step, (images, labels) in enumerate(train_loader):
                accelerator.backward(functional.cross_entropy(model(images), labels))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                if save and (epoch, step) == (1, MIDDLE):
                    accelerator.save_state(f"{folder}/middle")
            if save:
                accelerator.save_state(f"{folder}/epoch_{epoch}")
        return torch.cat([weight.detach().flatten() for weight in model.parameters()])

    first = train(save=True)
    accuracy = evaluate(accelerator, model, test_loader)
    accelerator.load_state(f"{folder}/middle")
    accelerator.print(f"loaded epoch {train_loader.iteration}")
    second = train(save=False)
    accelerator.print(f"weights that differ after resuming: {int((first != second).sum())} of {len(first)}")
    accelerator.print(f"accuracy: {accuracy:.3f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()

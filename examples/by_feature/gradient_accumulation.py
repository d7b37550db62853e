"""Train with batches that are four times as large as those that fit into memory.

    accel launch --cpu --num_processes 2 examples/by_feature/gradient_accumulation.py

`accumulate` scales the losses, synchronises gradients in the last micro batch of a window only, and lets the optimizer
step there only. A window that the end of the loader cuts short is scaled by its actual length.
"""

from __future__ import annotations

import torch
from common import digit_loaders, digit_model, evaluate
from torch.nn import functional

from accel import Accelerator
from accel.utils import set_seed


def main() -> None:
    accelerator = Accelerator(gradient_accumulation_steps=4)  # new
    set_seed(0)
    train_loader, test_loader = digit_loaders(batch_size=8)
    model = digit_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    model, optimizer, train_loader, test_loader = accelerator.prepare(model, optimizer, train_loader, test_loader)

    synchronisations = 0
    for _ in range(4):
        for images, labels in train_loader:
            with accelerator.accumulate(model):  # new
                accelerator.backward(functional.cross_entropy(model(images), labels))
                optimizer.step()
                optimizer.zero_grad()
            synchronisations += accelerator.sync_gradients
    accelerator.print(f"{4 * len(train_loader)} micro batches, {synchronisations} optimizer steps")
    accelerator.print(f"accuracy: {evaluate(accelerator, model, test_loader):.3f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()

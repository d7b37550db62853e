"""Evaluate an exponential moving average (EMA) of the weights, and keep the best weights of the run.

    accel launch --cpu --num_processes 2 examples/by_feature/moving_average.py

The script is the same with FSDP: each rank averages its part of the weights.
"""

from __future__ import annotations

import torch
from common import digit_loaders, digit_model, evaluate
from torch.nn import functional

from accel import Accelerator
from accel.utils import set_seed


def main() -> None:
    accelerator = Accelerator()
    set_seed(0)
    train_loader, test_loader = digit_loaders()
    model = digit_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    model, optimizer, train_loader, test_loader = accelerator.prepare(model, optimizer, train_loader, test_loader)
    ema = accelerator.moving_average(model, decay=0.9)
    best = accelerator.moving_average(model, use_buffers=True)

    best_accuracy = 0.0
    for _ in range(3):
        model.train()
        for images, labels in train_loader:
            accelerator.backward(functional.cross_entropy(model(images), labels))
            optimizer.step()
            ema.update()
            optimizer.zero_grad()
        accuracy = evaluate(accelerator, model, test_loader)
        with ema.applied():
            averaged = evaluate(accelerator, model, test_loader)
        accelerator.print(f"weights: {accuracy:.3f}, their average: {averaged:.3f}")
        if accuracy > best_accuracy:
            best_accuracy = accuracy
            best.reset()  # keeps the weights as they are now
    best.copy_to_model()
    accelerator.print(f"difference to the best accuracy: {evaluate(accelerator, model, test_loader) - best_accuracy}")
    accelerator.end_training()


if __name__ == "__main__":
    main()

"""Average weights every eight steps, instead of gradients in every step.

    accel launch --cpu --num_processes 2 examples/by_feature/local_sgd.py

This sends an eighth of the data. Between two averages each rank follows its own gradients, so the result is not that
of synchronous training.
"""

from __future__ import annotations

import torch
from common import digit_loaders, digit_model, evaluate
from torch.nn import functional

from accel import Accelerator
from accel.local_sgd import LocalSGD
from accel.utils import set_seed


def main() -> None:
    accelerator = Accelerator()
    set_seed(0)
    train_loader, test_loader = digit_loaders(batch_size=16)
    model = digit_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    model, optimizer, train_loader, test_loader = accelerator.prepare(model, optimizer, train_loader, test_loader)
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=8) as local_sgd:
        for _ in range(6):
            for images, labels in train_loader:
                with accelerator.accumulate(model):
                    accelerator.backward(functional.cross_entropy(model(images), labels))
                    optimizer.step()
                    optimizer.zero_grad()
                    local_sgd.step()
    weights = torch.cat([weight.detach().flatten() for weight in model.parameters()])
    spread = accelerator.gather(weights[None])
    accelerator.print(f"largest difference between ranks: {(spread - spread[0]).abs().max():.6f}")
    accelerator.print(f"accuracy: {evaluate(accelerator, model, test_loader):.3f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()

"""Stop all ranks in the same step when one of them sees that training is done.

    accel launch --cpu --num_processes 2 examples/by_feature/early_stopping.py

Each rank has a loss of its own. If one left the loop alone, the others would wait for it in their next collective.
"""

from __future__ import annotations

import torch
from common import digit_loaders, digit_model, evaluate
from torch.nn import functional

from accel import Accelerator
from accel.utils import gather_object, set_seed


def main() -> None:
    accelerator = Accelerator()
    set_seed(0)
    train_loader, test_loader = digit_loaders(batch_size=16)
    model = digit_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    model, optimizer, train_loader, test_loader = accelerator.prepare(model, optimizer, train_loader, test_loader)

    steps, stopped = 0, False
    while not stopped:
        for images, labels in train_loader:
            loss = functional.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
            if loss.item() < 0.1:
                accelerator.set_trigger()  # on this rank
            if accelerator.check_trigger():  # on every rank: true if any has set it
                stopped = True
                break
    accuracy = evaluate(accelerator, model, test_loader)
    accelerator.print("steps per rank:", *gather_object([steps]))
    accelerator.print(f"accuracy: {accuracy:.3f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()

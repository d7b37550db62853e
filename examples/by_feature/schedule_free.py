"""Train with a schedule-free optimizer, which needs no learning rate schedule.

    pip install schedulefree
    python examples/by_feature/schedule_free.py

The optimizer has two sets of weights: those of training and their average, for evaluation. Switch with
`optimizer.train()` and `optimizer.eval()`, and save in evaluation mode.
"""

from __future__ import annotations

import schedulefree
from common import digit_loaders, digit_model, evaluate, train_epoch

from accel import Accelerator
from accel.utils import set_seed


def main() -> None:
    accelerator = Accelerator()
    set_seed(0)
    train_loader, test_loader = digit_loaders()
    model = digit_model()
    optimizer = schedulefree.AdamWScheduleFree(model.parameters(), lr=1e-2)
    model, optimizer, train_loader, test_loader = accelerator.prepare(model, optimizer, train_loader, test_loader)
    for epoch in range(3):
        optimizer.train()
        train_epoch(accelerator, model, optimizer, train_loader)
        optimizer.eval()
        accuracy = evaluate(accelerator, model, test_loader)
        accelerator.print(f"epoch {epoch}: {accuracy:.3f}")
    accelerator.print(f"accuracy: {accuracy:.3f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()

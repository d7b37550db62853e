"""Compute a metric over a data set that the processes cannot share evenly.

    accel launch --cpu --num_processes 2 examples/by_feature/multi_process_metrics.py

359 samples in batches of 50 on two processes: the last batches are filled up with repeated samples, so that all ranks
make the same number of steps. `gather` returns the repetitions too; `gather_for_metrics` drops them.
"""

from __future__ import annotations

import torch
from common import digit_loaders, digit_model, digits, train_epoch
from sklearn.metrics import f1_score
from torch.utils.data import DataLoader, Subset

from accel import Accelerator
from accel.utils import set_seed


def main() -> None:
    accelerator = Accelerator()
    set_seed(0)
    train_loader, _ = digit_loaders()
    test_set = Subset(digits()[1], range(359))
    model = digit_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    model, optimizer, train_loader, test_loader = accelerator.prepare(
        model, optimizer, train_loader, DataLoader(test_set, batch_size=50)
    )
    for _ in range(2):
        train_epoch(accelerator, model, optimizer, train_loader)

    model.eval()
    with_repetitions = 0
    predictions, references = [], []
    for images, labels in test_loader:
        with torch.no_grad():
            predicted = model(images).argmax(dim=1)
        with_repetitions += len(accelerator.gather(predicted))
        predicted, labels = accelerator.gather_for_metrics((predicted, labels))
        predictions.append(predicted)
        references.append(labels)
    score = f1_score(torch.cat(references).cpu(), torch.cat(predictions).cpu(), average="macro")

    # The same in one process, without a prepared loader.
    plain = accelerator.unwrap_model(model)
    images, labels = (torch.stack([sample[part] for sample in test_set]) for part in range(2))
    with torch.no_grad():
        expected = f1_score(labels, plain(images.to(accelerator.device)).argmax(dim=1).cpu(), average="macro")
    accelerator.print(f"gather: {with_repetitions} samples, gather_for_metrics: {len(torch.cat(references))} samples")
    accelerator.print(f"F1: {score:.6f}, in one process: {expected:.6f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()

"""Train one model per fold, and average their predictions on the test set.

    accel launch --cpu --num_processes 2 examples/by_feature/cross_validation.py --folds 3

`free_memory` drops the references to the objects of a fold before the next one is prepared.
"""

from __future__ import annotations

import argparse

import torch
from common import digit_model, digits, evaluate, train_epoch
from sklearn.model_selection import StratifiedKFold
from torch.utils.data import DataLoader, Subset

from accel import Accelerator
from accel.utils import set_seed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folds", type=int, default=3, help="default: 3")
    folds = parser.parse_args().folds
    accelerator = Accelerator()
    train_set, test_set = digits()
    test_loader = accelerator.prepare(DataLoader(test_set, batch_size=50))
    splits = StratifiedKFold(n_splits=folds).split(*(tensor.numpy() for tensor in train_set.tensors))

    logits, labels = [], []
    for fold, (train_indices, valid_indices) in enumerate(splits):
        set_seed(fold)
        train_loader = DataLoader(Subset(train_set, train_indices.tolist()), batch_size=32, shuffle=True)
        valid_loader = DataLoader(Subset(train_set, valid_indices.tolist()), batch_size=50)
        model = digit_model()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        model, optimizer, train_loader, valid_loader = accelerator.prepare(model, optimizer, train_loader, valid_loader)
        for _ in range(3):
            train_epoch(accelerator, model, optimizer, train_loader)
        accelerator.print(f"fold {fold}: accuracy {evaluate(accelerator, model, valid_loader):.3f}")

        parts = []
        labels.clear()
        for images, targets in test_loader:
            with torch.no_grad():
                scores, targets = accelerator.gather_for_metrics((model(images), targets))
            parts.append(scores)
            labels.append(targets)
        logits.append(torch.cat(parts))
        model, optimizer, train_loader, valid_loader = accelerator.free_memory(
            model, optimizer, train_loader, valid_loader
        )
    predictions = torch.stack(logits).mean(dim=0).argmax(dim=1)
    accelerator.print(f"accuracy: {(predictions == torch.cat(labels)).float().mean():.3f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()

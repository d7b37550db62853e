"""Find the largest batch size that fits into memory.

    python examples/by_feature/memory.py --fits 24

When the decorated function runs out of memory, it is called again with nine tenths of the batch size. Create everything
that depends on the batch size inside it. See automatic_gradient_accumulation.py for keeping the total batch size.
"""

from __future__ import annotations

import argparse

import torch
from common import digit_loaders, digit_model, evaluate, train_epoch

from accel import Accelerator, find_executable_batch_size
from accel.utils import set_seed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fits", type=int, default=None, help="simulate memory for this number of samples")
    fits = parser.parse_args().fits
    accelerator = Accelerator()
    tried = []

    @find_executable_batch_size(starting_batch_size=64)
    def train(batch_size: int) -> float:
        accelerator.free_memory()
        tried.append(batch_size)
        set_seed(0)
        train_loader, test_loader = digit_loaders(batch_size)
        model = digit_model()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        model, optimizer, train_loader, test_loader = accelerator.prepare(model, optimizer, train_loader, test_loader)
        if fits is not None and batch_size > fits:
            raise torch.OutOfMemoryError(f"CUDA out of memory: {batch_size} samples, simulated by --fits")
        for _ in range(3):
            train_epoch(accelerator, model, optimizer, train_loader)
        return evaluate(accelerator, model, test_loader)

    accuracy = train()
    accelerator.print("batch sizes tried:", *tried)
    accelerator.print(f"accuracy: {accuracy:.3f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()

"""Find the largest micro batch that fits into memory, and accumulate up to the batch size that you want.

    accel launch --cpu --num_processes 2 examples/by_feature/automatic_gradient_accumulation.py --fits 16

The decorated function is called again with a smaller batch size whenever it runs out of memory. A CPU seldom does, so
`--fits N` raises the error of a device whose memory holds N samples; on a GPU leave it out.
"""

from __future__ import annotations

import argparse

import torch
from common import digit_loaders, digit_model, evaluate
from torch.nn import functional

from accel import Accelerator, find_executable_batch_size
from accel.utils import set_seed

BATCH_SIZE = 64  # per process and optimizer step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fits", type=int, default=None, help="simulate memory for this number of samples")
    fits = parser.parse_args().fits
    accelerator = Accelerator()

    @find_executable_batch_size(starting_batch_size=BATCH_SIZE, reduce_batch_size_fn=lambda size: size // 2)
    def train(batch_size: int) -> float:
        accelerator.free_memory()  # what the failed attempt has prepared
        accelerator.gradient_accumulation_steps = BATCH_SIZE // batch_size
        set_seed(0)
        train_loader, test_loader = digit_loaders(batch_size)
        model = digit_model()
        optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
        model, optimizer, train_loader, test_loader = accelerator.prepare(model, optimizer, train_loader, test_loader)
        for _ in range(4):
            for images, labels in train_loader:
                if fits is not None and len(images) > fits:
                    raise torch.OutOfMemoryError(f"CUDA out of memory: {len(images)} samples, simulated by --fits")
                with accelerator.accumulate(model):
                    accelerator.backward(functional.cross_entropy(model(images), labels))
                    optimizer.step()
                    optimizer.zero_grad()
        accelerator.print(f"batch size {batch_size}, {accelerator.gradient_accumulation_steps} accumulation steps")
        return evaluate(accelerator, model, test_loader)

    accelerator.print(f"accuracy: {train():.3f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()

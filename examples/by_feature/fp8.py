"""Train with 8-bit matrix products.

    accel launch --cpu --num_processes 2 examples/by_feature/fp8.py

On a CPU, or a GPU without FP8, the numbers are those of 8 bits without the speed. The first and the last layer keep
16 bits, because they are the most sensitive.
"""

from __future__ import annotations

import torch
from common import digit_loaders, evaluate, train_epoch
from torch import nn

from accel import Accelerator
from accel.utils import NativeRecipeKwargs, set_seed


def main() -> None:
    accelerator = Accelerator(mixed_precision="fp8", kwargs_handlers=[NativeRecipeKwargs(scaling="dynamic")])
    set_seed(0)
    train_loader, test_loader = digit_loaders(batch_size=16)
    # FP8 needs dimensions that are multiples of 16.
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 16))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    model, optimizer, train_loader, test_loader = accelerator.prepare(model, optimizer, train_loader, test_loader)
    for _ in range(3):
        train_epoch(accelerator, model, optimizer, train_loader)
    layers = [type(module).__name__ for module in accelerator.unwrap_model(model).modules()]
    accelerator.print(f"FP8 layers: {layers.count('NativeLinear')}, back end {accelerator.fp8_backend}")
    accelerator.print(f"accuracy: {evaluate(accelerator, model, test_loader):.3f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()

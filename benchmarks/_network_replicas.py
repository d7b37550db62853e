"""The training of the rows with --ft of network_faults.py: replicas on both hosts.

_network_replicas.py FOLDER STEPS SECONDS
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel import Accelerator


def main() -> None:
    """Train, and note the steps."""
    folder, steps, seconds = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    torch.manual_seed(3)
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    data = TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=4))
    accelerator.resume()
    while optimizer.steps_taken < steps:
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                accelerator.backward((model(inputs) - targets).pow(2).mean())
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                (folder / "steps.part").write_text(str(optimizer.steps_taken))
                os.replace(folder / "steps.part", folder / "steps")
                time.sleep(seconds)
            if optimizer.steps_taken >= steps:
                break
    accelerator.end_training()


main()

"""Train on Amazon SageMaker, or on this machine.

    accel launch --config_file examples/sagemaker/config.yaml examples/sagemaker/train.py --epochs 4
    accel launch --cpu --num_processes 2 examples/sagemaker/train.py --epochs 4

What a script for SageMaker needs: arguments as `--name value` pairs, and results in the directory of SM_MODEL_DIR,
which SageMaker uploads when the job ends. The directory of the script is uploaded, and its
requirements.txt is installed.
"""

from __future__ import annotations

import argparse
import os

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from accel import Accelerator
from accel.utils import set_seed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--output_dir", default=os.environ.get("SM_MODEL_DIR", "runs/sagemaker"))
    options = parser.parse_args()
    accelerator = Accelerator()
    set_seed(0)
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
    model = nn.Sequential(nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=16, shuffle=True))
    for _ in range(options.epochs):
        for inputs, targets in loader:
            loss = functional.cross_entropy(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    accelerator.save_model(model, options.output_dir)
    accelerator.print(f"last loss: {accelerator.reduce(loss.detach(), 'mean').item():.3f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()

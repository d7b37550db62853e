"""Compile a model, and get the same numbers.

    python examples/by_feature/torch_compile.py --backend inductor
    accel launch --dynamo_backend inductor train.py           # the same without changing a script

Compilation happens in the first step. A new input shape compiles again, so drop the last, shorter batch or use
`dynamic=True`.
"""

from __future__ import annotations

import argparse

import torch
from common import digit_model, digits
from torch.nn import functional
from torch.utils.data import DataLoader

from accel import Accelerator, TorchDynamoPlugin
from accel.utils import set_seed


def train(backend: str) -> torch.Tensor:
    accelerator = Accelerator(dynamo_plugin=TorchDynamoPlugin(backend=backend))
    set_seed(0)
    loader = DataLoader(digits()[0], batch_size=32, drop_last=True)
    model = digit_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for images, labels in loader:
        loss = functional.cross_entropy(model(images), labels)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    accelerator.print(f"{backend}: last loss {losses[-1]:.6f}, class {type(model).__name__}")
    accelerator.end_training()
    return torch.stack(losses)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="inductor", help="default: inductor, which needs a C++ compiler")
    compiled = train(parser.parse_args().backend)
    eager = train("no")
    print(f"largest difference to eager mode: {(compiled - eager).abs().max():.6f}")


if __name__ == "__main__":
    main()

"""Train a small network on scikit-learn's digits on an XLA device (a TPU, or a CPU), and count what XLA compiles.

pip install --find-links dist 'accel[xla]>=1.0' scikit-learn
PJRT_DEVICE=CPU python examples/xla.py
PJRT_DEVICE=CPU CPU_NUM_DEVICES=4 python examples/xla.py --dp_shard_size 4    # sharded over the devices of one process
accel launch --tpu examples/xla.py                                           # main() on every chip of a TPU host
"""

from __future__ import annotations

import argparse

import torch
import torch_xla.debug.metrics as metrics
from digits import DigitsNet, digits
from torch.nn import functional
from torch.utils.data import DataLoader

from accel import Accelerator, ParallelismConfig
from accel.utils import set_seed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--dp_shard_size", type=int, default=1, help="devices of this process to shard over (default 1)"
    )
    parser.add_argument("--steps", type=int, default=40, help="training steps, at most 44 (default 40)")
    arguments = parser.parse_args()

    sharded = arguments.dp_shard_size > 1
    mesh = ParallelismConfig(dp_shard_size=arguments.dp_shard_size) if sharded else None
    accelerator = Accelerator(parallelism_config=mesh)
    set_seed(0)
    strategy = type(accelerator.strategy).__name__
    print(f"device {accelerator.device}, type {accelerator.distributed_type}, strategy {strategy}")

    train_set, test_set = digits()
    model = DigitsNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    # Batches of one size: those of 32 samples are the sum of what the devices get.
    size = 32 // arguments.dp_shard_size
    model, optimizer, train_loader, test_loader = accelerator.prepare(
        model, optimizer, DataLoader(train_set, batch_size=size, drop_last=True), DataLoader(test_set, batch_size=size)
    )
    for step, (images, labels) in enumerate(train_loader, 1):
        loss = functional.cross_entropy(model(images), labels)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if step in (1, 2, 3, arguments.steps):
            # item() waits for the device; a real script does it once in many steps.
            compiled = metrics.counter_value("UncachedCompile")
            print(f"step {step}: loss {loss.item():.4f}, compiled {compiled} graphs so far")
        if step == arguments.steps:
            break
    model.eval()
    correct = samples = 0
    for images, labels in test_loader:
        with torch.no_grad():
            predictions = model(images).argmax(dim=1)
        predictions, labels = accelerator.gather_for_metrics((predictions, labels))
        correct, samples = correct + (predictions == labels).sum(), samples + len(labels)
    print(f"accuracy {int(correct) / samples:.3f} on {samples} samples")
    accelerator.end_training()


if __name__ == "__main__":
    main()

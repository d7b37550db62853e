"""Shard a model with FSDP 2, and measure the memory that each process needs.

    accel launch --cpu --num_processes 2 examples/by_feature/fsdp_with_peak_mem_tracking.py
    accel launch --cpu --num_processes 1 examples/by_feature/fsdp_with_peak_mem_tracking.py

The script counts the bytes of parameters, gradients and Adam's states on rank 0. With n processes they are 1/n of those
of one process. The peak is that of the GPU; on a CPU it is the resident memory of the process, which also contains
the libraries.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterable

import torch
from common import digit_loaders, digit_model, evaluate
from torch.distributed.tensor import DTensor
from torch.nn import functional

from accel import Accelerator, FullyShardedDataParallelPlugin
from accel.utils import set_seed


class PeakMemory:
    """The peak of allocated memory within the block, in bytes."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.peak = device, 0

    def __enter__(self) -> PeakMemory:
        if self.device.type != "cpu":
            torch.get_device_module(self.device).reset_peak_memory_stats()
        return self

    def __exit__(self, *_: object) -> None:
        if self.device.type != "cpu":
            self.peak = torch.get_device_module(self.device).max_memory_allocated()
        else:  # kilobytes on Linux, bytes on macOS; of the whole life of the process
            self.peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def local_bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum((tensor.to_local() if isinstance(tensor, DTensor) else tensor).nbytes for tensor in tensors)


def main() -> None:
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=1000, reshard_after_forward=True
    )
    accelerator = Accelerator(fsdp_plugin=plugin)
    set_seed(0)
    train_loader, test_loader = digit_loaders()
    model = digit_model(width=256)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    model, optimizer, train_loader, test_loader = accelerator.prepare(model, optimizer, train_loader, test_loader)
    with PeakMemory(accelerator.device) as memory:
        for images, labels in train_loader:
            optimizer.zero_grad()
            accelerator.backward(functional.cross_entropy(model(images), labels))
            optimizer.step()
    weights = list(model.parameters())
    moments = [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    held = local_bytes(weights) + local_bytes(gradients) + local_bytes(moments)
    total = 16 * sum(weight.numel() for weight in weights)  # four float32 numbers a parameter
    accelerator.print(f"peak: {memory.peak >> 20} MiB")
    accelerator.print(f"accuracy: {evaluate(accelerator, model, test_loader):.3f}")
    accelerator.print(f"share on rank 0: {held / total:.3f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()

"""Share each layer between processes (tensor parallelism).

    accel launch --cpu --num_processes 2 --use_parallelism_config --parallelism_config_tp_size 2 \\
        examples/by_feature/tensor_parallel.py
    accel launch --cpu --num_processes 1 examples/by_feature/tensor_parallel.py

Attention is sharded by heads, so the number of processes must divide the number of heads. All ranks get the same
batches. Both commands print the same loss.
"""

from __future__ import annotations

import torch
from common import tiny_llama, zen_loader

from accel import Accelerator
from accel.utils import set_seed


def main() -> None:
    accelerator = Accelerator()
    set_seed(0)
    model = tiny_llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, zen_loader())
    local = sum(
        weight.to_local().numel() if hasattr(weight, "to_local") else weight.numel() for weight in model.parameters()
    )
    for _ in range(2):
        for batch in loader:
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    accelerator.print(f"parameters on rank 0: {local}")
    accelerator.print(f"last loss: {loss.item():.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()

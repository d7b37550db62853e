"""Give each process some of the layers (pipeline parallelism).

    accel launch --cpu --num_processes 2 --use_parallelism_config --parallelism_config_pp_size 2 \\
        examples/by_feature/pipeline_parallel.py
    accel launch --cpu --num_processes 1 examples/by_feature/pipeline_parallel.py

A batch passes through the stages in micro batches. Calling the model runs their forward and backward passes;
`backward` adds the gradients to the parameters. Both commands print the same loss.
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
    local = sum(weight.numel() for weight in model.parameters())
    for _ in range(2):
        for batch in loader:
            loss = model(**batch).loss  # of the full batch, on every rank
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    accelerator.print(f"parameters on rank 0: {local}")
    accelerator.print(f"last loss: {loss.item():.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()

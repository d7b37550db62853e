"""Share each sequence between processes, and attention by heads (sequence parallelism, Ulysses).

    accel launch --cpu --num_processes 2 --use_parallelism_config --parallelism_config_sp_size 2 \\
        examples/by_feature/sequence_parallel.py
    accel launch --cpu --num_processes 1 examples/by_feature/sequence_parallel.py

The adapter shards the batches of a loader along the sequence. Both commands print the same loss.
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
    for _ in range(2):
        for batch in accelerator.deepspeed_ulysses_dl_adapter(loader, model):
            length = batch["input_ids"].shape[1]
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    accelerator.print(f"tokens of a sequence on rank 0: {length}")
    accelerator.print(f"last loss: {accelerator.reduce(loss.detach(), 'mean').item():.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()

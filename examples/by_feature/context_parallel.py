"""Share each sequence between processes (context parallelism, ring attention).

    accel launch --cpu --num_processes 2 --use_parallelism_config --parallelism_config_cp_size 2 \\
        examples/by_feature/context_parallel.py
    accel launch --cpu --num_processes 1 examples/by_feature/context_parallel.py

`maybe_context_parallel` names the tensors to shard along the sequence; it contains the forward and backward pass. Both
commands print the same loss.
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
        for batch in loader:
            tokens, labels = batch["input_ids"], batch["labels"]
            with accelerator.maybe_context_parallel(
                buffers=[tokens, labels], buffer_seq_dims=[1, 1], no_restore_buffers={tokens, labels}
            ):
                length = tokens.shape[1]
                loss = model(input_ids=tokens, labels=labels).loss
                accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    accelerator.print(f"tokens of a sequence on rank 0: {length}")
    accelerator.print(f"last loss: {accelerator.reduce(loss.detach(), 'mean').item():.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()

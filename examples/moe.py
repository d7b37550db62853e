"""Train a small mixture of experts on text of Python's own, with the experts distributed over processes or not.

    accel launch --cpu --num_processes 1 examples/moe.py
    accel launch --cpu --num_processes 4 --use_fsdp --fsdp_version 2 --use_parallelism_config \\
        --parallelism_config_dp_shard_size 4 --parallelism_config_ep_size 2 examples/moe.py

The second command has four ranks with samples of their own: two groups of experts (ep 2), each sharded over two ranks.
Both print the same losses: the auxiliary loss, too, is computed from the tokens of all ranks.
"""

from __future__ import annotations

import argparse
import inspect

import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from accel import Accelerator, DataLoaderConfiguration
from accel.utils import expert_load, set_seed

LENGTH, BATCH = 64, 16


def samples() -> torch.Tensor:
    """The source of a module of Python, in pieces: a token is a byte."""
    text = torch.tensor(list(inspect.getsource(argparse).encode()[: 400 * LENGTH]))
    return text.view(-1, LENGTH)


def mixture() -> nn.Module:
    config = Qwen3MoeConfig(
        vocab_size=256,
        hidden_size=64,
        moe_intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        output_router_logits=True,  # adds the auxiliary loss, which keeps all experts busy
        router_aux_loss_coef=0.01,
        max_position_embeddings=LENGTH,
    )
    return AutoModelForCausalLM.from_config(config)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    # In a long run one process with another number of threads differs as well: rounding decides to which expert a token
    # goes that two of them suit equally well.
    parser.add_argument("--steps", type=int, default=20, help="training steps (default 20)")
    arguments = parser.parse_args()

    # A batch of 16 samples is split over the ranks, so that any number of them takes the same steps.
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(split_batches=True))
    set_seed(0)
    model = mixture()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = DataLoader(samples(), batch_size=BATCH, shuffle=True, drop_last=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    distributed = accelerator.parallelism_config is not None and accelerator.parallelism_config.ep_enabled

    step = 0
    while step < arguments.steps:
        for tokens in loader:
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step in (1, 10, arguments.steps):
                accelerator.print(f"step {step}: loss {accelerator.reduce(loss.detach(), 'mean').item():.4f}")
            if step == arguments.steps:
                break
    accelerator.print(f"last loss: {accelerator.reduce(loss.detach(), 'mean').item():.4f}")
    if distributed:
        load = expert_load(model)
        for name, counts in load.tokens.items():
            accelerator.print(f"{name}: tokens {counts.tolist()}")
        imbalance = load.values()["experts/imbalance"]
        accelerator.print(f"the busiest expert has {imbalance:.2f} times the tokens of the mean")
    accelerator.end_training()


if __name__ == "__main__":
    main()

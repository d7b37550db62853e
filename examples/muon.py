"""Train a small language model on text of Python's own with Muon for hidden matrices and AdamW for the rest.

    accel launch --cpu --num_processes 1 examples/muon.py
    accel launch --cpu --num_processes 2 --use_fsdp --fsdp_version 2 examples/muon.py

Both print the same losses. On several ranks each matrix is orthogonalised by one of them, whatever shards it has.
"""

from __future__ import annotations

import argparse
import inspect

import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, LlamaConfig

from accel import Accelerator, DataLoaderConfiguration
from accel.utils import set_seed

LENGTH, BATCH = 64, 16


def samples() -> torch.Tensor:
    """The source of a module of Python, in pieces: a token is a byte."""
    text = torch.tensor(list(inspect.getsource(argparse).encode()[: 400 * LENGTH]))
    return text.view(-1, LENGTH)


def language_model() -> nn.Module:
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
    )
    return AutoModelForCausalLM.from_config(config)


def optimizers_of(model: nn.Module) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    """Muon for the matrices of hidden layers; AdamW for the embedding, the output layer and the norms."""
    hidden = [parameter for parameter in model.model.layers.parameters() if parameter.ndim == 2]
    chosen = {id(parameter) for parameter in hidden}
    rest = [parameter for parameter in model.parameters() if id(parameter) not in chosen]
    # With match_rms_adamw, Muon takes the learning rate and the weight decay of AdamW.
    muon = torch.optim.Muon(hidden, lr=3e-3, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    return muon, torch.optim.AdamW(rest, lr=3e-3, weight_decay=0.1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40, help="training steps (default 40)")
    arguments = parser.parse_args()

    # Muon rounds to bfloat16, where the last bit of a gradient may decide. These two make it the same on all numbers of
    # ranks; without them losses differ by as much as from one order of the samples to another.
    accelerator = Accelerator(
        dataloader_config=DataLoaderConfiguration(elastic=True, logical_shards=4), deterministic_reduction=True
    )
    set_seed(0)
    model = language_model()
    muon, adamw = optimizers_of(model)
    loader = DataLoader(samples(), batch_size=BATCH, shuffle=True, drop_last=True)
    model, muon, adamw, loader = accelerator.prepare(model, muon, adamw, loader)
    # Returns the same objects; to type checkers they now have `logical_shard` and `steps_taken`.
    loader, muon = accelerator.prepare_data_loader(loader), accelerator.prepare_optimizer(muon)

    loss_of_step = torch.zeros((), device=accelerator.device)
    while muon.steps_taken < arguments.steps:
        for tokens in loader:
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in (muon, adamw):
                optimizer.step()
                optimizer.zero_grad()
            shard = loader.logical_shard
            loss_of_step = loss.detach() * shard.weight + (loss_of_step if shard.slot else 0)
            if accelerator.sync_gradients and muon.steps_taken in (1, 20, arguments.steps):
                accelerator.print(f"step {muon.steps_taken}: loss {accelerator.reduce(loss_of_step).item():.4f}")
                if muon.steps_taken == arguments.steps:
                    break
    accelerator.print(f"last loss: {accelerator.reduce(loss_of_step).item():.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()

"""Train on documents packed into long sequences, which two ranks share: context parallelism.

    accel launch --cpu --num_processes 1 examples/packed_long_context.py
    accel launch --cpu --num_processes 2 --use_parallelism_config --parallelism_config_cp_size 2 \\
        --parallelism_config_cp_balance documents examples/packed_long_context.py

Both print the same losses. Each document attends to itself only, also where it is split over the ranks. The documents
are the functions of Python's own modules, and the model comes from a configuration.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import textwrap

import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, LlamaConfig

from accel import Accelerator
from accel.utils import set_seed

LENGTH, BATCH = 1024, 2
IGNORED = -100  # the label of tokens that are predicted by nothing


def documents() -> list[torch.Tensor]:
    """The functions of three modules, of 20 to several thousand bytes: a token is a byte."""
    found = []
    for module in (argparse, inspect, textwrap):
        source = inspect.getsource(module)
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef):
                text = (ast.get_source_segment(source, node) or "").encode()
                found.append(torch.tensor(list(text[:LENGTH])))  # a longer one would not fit into a sequence
    return found


def packed(found: list[torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """Documents in sequences: the longest first, each into the first sequence that has room."""
    sequences: list[list[torch.Tensor]] = []
    for document in sorted(found, key=len, reverse=True):
        room = (one for one in sequences if sum(map(len, one)) + len(document) <= LENGTH)
        fits = next(room, None)
        if fits is None:
            sequences.append([document])
        else:
            fits.append(document)
    return [sample(one) for one in sequences]


def sample(parts: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """A sequence whose positions begin again with each document. The first token of one is predicted by nothing."""
    tokens, positions = torch.zeros(LENGTH, dtype=torch.long), torch.zeros(LENGTH, dtype=torch.long)
    labels = torch.full((LENGTH,), IGNORED)
    begin = 0
    for part in parts:
        end = begin + len(part)
        tokens[begin:end] = labels[begin:end] = part
        labels[begin] = IGNORED
        positions[begin:end] = torch.arange(len(part))
        begin = end
    return {"input_ids": tokens, "labels": labels, "position_ids": positions}


def language_model() -> nn.Module:
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        attn_implementation="sdpa",
    )
    return AutoModelForCausalLM.from_config(config)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40, help="training steps (default 40)")
    arguments = parser.parse_args()

    accelerator = Accelerator()
    set_seed(0)
    found = documents()
    data = packed(found)
    accelerator.print(f"{len(found)} documents in {len(data)} sequences of {LENGTH} tokens")
    used = sum(map(len, found)) / (len(data) * LENGTH)
    accelerator.print(f"padding: {1 - used:.1%} (one document a sequence: {1 - used * len(data) / len(found):.1%})")
    model = language_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = DataLoader(data, batch_size=BATCH, shuffle=True, drop_last=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    step = 0
    while step < arguments.steps:
        for batch in loader:
            buffers = list(batch.values())
            # Within the block, each buffer has this rank's tokens. Positions have to be among them: they tell where
            # documents begin, and which tokens to give to whom. No attention_mask: it would hide that.
            with accelerator.maybe_context_parallel(buffers, [1] * len(buffers), set(buffers)):
                own = batch["input_ids"].shape[1]
                loss = model(**batch, use_cache=False).loss
                accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step in (1, 20, arguments.steps):
                accelerator.print(f"step {step}: loss {accelerator.reduce(loss.detach(), 'mean').item():.4f}")
            if step == arguments.steps:
                break
    accelerator.print(f"tokens of a sequence on rank 0: {own}")
    accelerator.print(f"last loss: {accelerator.reduce(loss.detach(), 'mean').item():.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()

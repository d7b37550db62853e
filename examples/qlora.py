"""Train adapters on a language model whose weights are stored in 4 bits, sharded by FSDP 2: QLoRA.

    accel launch --cpu --num_processes 1 examples/qlora.py
    accel launch --cpu --num_processes 2 --use_fsdp --fsdp_version 2 \\
        --fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP examples/qlora.py

Both print the same losses. A rank holds its share of the 4-bit weights, and saves the adapters alone. The text is
Python's own, and the model comes from a configuration.
"""

from __future__ import annotations

import argparse
import inspect
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, LlamaConfig

from accel import Accelerator, DataLoaderConfiguration
from accel.utils import set_seed
from accel_quant import BnbQuantizationConfig, load_and_quantize_model

LENGTH, BATCH, RANK = 64, 16, 8


class Adapted(nn.Module):
    """A frozen layer, and a low-rank adapter that begins with zeros."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, RANK, bias=False)
        self.up = nn.Linear(RANK, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def samples() -> torch.Tensor:
    """The source of a module of Python, in pieces: a token is a byte."""
    text = torch.tensor(list(inspect.getsource(argparse).encode()[: 400 * LENGTH]))
    return text.view(-1, LENGTH)


def adapted_model() -> nn.Module:
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=LENGTH,
    )
    # Bytes of any type are sharded; storage of another type than that of the other weights would be converted by
    # mixed precision, which is refused.
    settings = BnbQuantizationConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, torch_dtype=torch.float32
    )
    model = load_and_quantize_model(AutoModelForCausalLM.from_config(config), settings)
    model.requires_grad_(False)
    layers = model.model.layers
    for name, layer in list(layers.named_modules()):
        if isinstance(layer, nn.Linear):
            parent, _, child = name.rpartition(".")
            setattr(layers.get_submodule(parent), child, Adapted(layer))
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40, help="training steps (default 40)")
    parser.add_argument("--output_dir", type=Path, help="where to save the adapters")
    arguments = parser.parse_args()

    # A batch of 16 samples is split over the ranks, so that any number of them takes the same steps.
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(split_batches=True))
    set_seed(0)
    model = adapted_model()
    # With a smaller eps, the rounding of gradients near zero makes steps of its own, and losses differ between numbers
    # of ranks.
    optimizer = torch.optim.AdamW([item for item in model.parameters() if item.requires_grad], lr=3e-3, eps=1e-3)
    loader = DataLoader(samples(), batch_size=BATCH, shuffle=True, drop_last=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    step = 0
    while step < arguments.steps:
        for tokens in loader:
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step in (1, 20, arguments.steps):
                accelerator.print(f"step {step}: loss {accelerator.reduce(loss.detach(), 'mean').item():.4f}")
            if step == arguments.steps:
                break
    accelerator.print(f"last loss: {accelerator.reduce(loss.detach(), 'mean').item():.4f}")

    packed = [item for item in model.parameters() if item.dtype == torch.uint8]
    whole, own = (sum(item.nbytes for item in items) for items in (packed, map(part_of, packed)))
    accelerator.print(f"4-bit weights: {whole / 2**10:.1f} KiB, of which rank 0 holds {own / 2**10:.1f} KiB")
    # One adapter is gathered at a time, and no weight in 4 bits.
    adapters = accelerator.get_state_dict(model, trainable_only=True)
    if arguments.output_dir is not None and accelerator.is_main_process:
        arguments.output_dir.mkdir(parents=True, exist_ok=True)
        save_file(adapters, arguments.output_dir / "adapters.safetensors")
    accelerator.print(f"adapters: {sum(item.nbytes for item in adapters.values()) / 2**10:.1f} KiB")
    accelerator.end_training()


def part_of(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


if __name__ == "__main__":
    main()

"""Train a small GPT-2 on text that ships with Python, with Megatron-core or in one process, and save it.

    pip install --find-links dist 'accel[megatron]>=1.0'
    accel launch --config_file examples/megatron_configs/tp2_pp2.yaml examples/megatron_gpt.py --output_dir out
    python examples/big_model.py --checkpoint out

Without a launcher, the script trains in one process, to the same loss. Megatron-core runs on CUDA devices; with
`--simulate` the script runs on CPU ranks, through a redirection that is made for tests:

    accel launch --cpu --config_file examples/megatron_configs/tp2_pp2.yaml examples/megatron_gpt.py --simulate
"""

from __future__ import annotations

import argparse
import pydoc_data.topics
from collections.abc import Sequence

import torch
from torch import nn
from torch.utils.data import DataLoader

from accel import Accelerator, DataLoaderConfiguration
from accel.utils import DistributedType, set_seed

VOCABULARY = 128


def make_model(width: int, layers: int, block: int) -> nn.Module:
    """A GPT-2 of characters, with random weights and without dropout, so that all configurations train alike."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=block,
        n_embd=width,
        n_layer=layers,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config)


def make_samples(block: int, samples: int) -> list[dict[str, torch.Tensor]]:
    """Blocks of the texts of Python's help system."""
    text = "\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
    ids = torch.tensor([min(ord(letter), VOCABULARY - 1) for letter in text[: block * samples]])
    return [{"input_ids": row, "labels": row.clone()} for row in ids.view(-1, block)]


def train(arguments: argparse.Namespace) -> None:
    accelerator = Accelerator(cpu=arguments.simulate, dataloader_config=DataLoaderConfiguration(split_batches=True))
    set_seed(arguments.seed)
    model = make_model(arguments.width, arguments.layers, arguments.block)
    uses_megatron = accelerator.distributed_type == DistributedType.MEGATRON_LM
    # With Megatron-core, the loader's batch size is that of a micro batch.
    micro_batches = accelerator.state.megatron_lm_plugin.num_micro_batches if uses_megatron else 1
    samples = make_samples(arguments.block, arguments.batch_size * arguments.steps)
    loader = DataLoader(samples, batch_size=arguments.batch_size // micro_batches)  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 - 0.5 * step / arguments.steps)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    accelerator.print(f"{accelerator.num_processes} processes, {accelerator.distributed_type.value}")
    model.train()
    for step, batch in enumerate(loader, start=1):
        loss = model(**batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if step % 10 == 0 or step == 1:
            # Megatron-core's loss is that of all ranks already; averaging it again changes nothing.
            mean = accelerator.reduce(loss.detach(), "mean").item()
            accelerator.print(f"step {step:3d}  loss {mean:.6f}")
    if arguments.output_dir:
        unwrapped = accelerator.unwrap_model(model)
        unwrapped.save_pretrained(
            arguments.output_dir, is_main_process=accelerator.is_main_process, save_function=accelerator.save
        )
        accelerator.print(f"saved {arguments.output_dir}")
    accelerator.end_training()


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps (default 20)")
    parser.add_argument("--batch_size", type=int, default=16, help="samples of a step (default 16)")
    parser.add_argument("--block", type=int, default=64, help="characters of a sample (default 64)")
    parser.add_argument("--width", type=int, default=64, help="hidden size (default 64)")
    parser.add_argument("--layers", type=int, default=4, help="number of blocks (default 4)")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate (default 1e-3)")
    parser.add_argument("--seed", type=int, default=0, help="random seed (default 0)")
    parser.add_argument("--output_dir", default="", help="where to save the model (default: not saved)")
    parser.add_argument("--simulate", action="store_true", help="run on CPU ranks, for tests")
    return parser.parse_args(argv)


if __name__ == "__main__":
    arguments = parse()
    if arguments.simulate:
        from accel_megatron.testing import cuda_on_cpu

        cuda_on_cpu()
    train(arguments)

"""Share a GPT-2 among processes, and send batches through it as a pipeline.

    accel launch --cpu --num_processes 2 examples/pipelined_inference.py
    torchrun --nproc_per_node 2 examples/pipelined_inference.py --layers 8

The model has random weights, so nothing is downloaded; every process builds it alike. Each keeps only its own stage.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from transformers import GPT2Config, GPT2ForSequenceClassification

from accel import PartialState
from accel.inference import prepare_pippy
from accel.utils import set_seed

WORDS, LENGTH = 1000, 32


def build(layers: int) -> GPT2ForSequenceClassification:
    set_seed(0)
    config = GPT2Config(
        vocab_size=WORDS, n_positions=64, n_embd=64, n_head=4, n_layer=layers, num_labels=3, pad_token_id=0
    )
    return GPT2ForSequenceClassification(config).eval()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument(
        "--num_chunks", type=int, default=None, help="pieces of a batch (default: one for each process)"
    )
    options = parser.parse_args(arguments)
    state = PartialState()
    tokens = torch.randint(1, WORDS, (6, LENGTH), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = build(options.layers)(tokens, use_cache=False).logits

    model = prepare_pippy(
        build(options.layers), example_args=(tokens[:2],), num_chunks=options.num_chunks, gather_output=True
    )
    held = sum(parameter.numel() for parameter in model.parameters() if not parameter.is_meta)
    state.print(f"stages begin at: {', '.join(['the start', *model.hf_split_points])}")
    state.print(f"process 0 holds {held} of {sum(parameter.numel() for parameter in model.parameters())} parameters")
    for size in (6, 5):  # a batch that the chunks do not divide is filled up, and cut again
        logits = model(tokens[:size]).logits
        difference = (logits.cpu() - expected[:size]).abs().max().item()
        state.print(
            f"batch of {size}: logits of shape {tuple(logits.shape)}, equal to those of the whole model: "
            f"{difference < 1e-5}"
        )
    state.destroy_process_group()


if __name__ == "__main__":
    main()

"""Split a GPT-2 into pipeline stages on several processes, and run batches through it.

    accel launch --cpu --num_processes 2 examples/pipelined_inference.py
    torchrun --nproc_per_node 2 examples/pipelined_inference.py --layers 8

The model has random weights, so nothing is downloaded. Every process builds the same model and keeps only its stage.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from transformers import GPT2Config, GPT2ForSequenceClassification

from accel import PartialState
from accel.inference import prepare_pippy
from accel.utils import set_seed

VOCABULARY, LENGTH = 1000, 32


def build(layers: int) -> GPT2ForSequenceClassification:
    set_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=64, n_embd=64, n_head=4, n_layer=layers, num_labels=3, pad_token_id=0
    )
    return GPT2ForSequenceClassification(config).eval()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument(
        "--num_chunks", type=int, default=None, help="number of micro batches (default: the number of processes)"
    )
    options = parser.parse_args(arguments)
    state = PartialState()
    tokens = torch.randint(1, VOCABULARY, (6, LENGTH), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = build(options.layers)(tokens, use_cache=False).logits

    model = build(options.layers)
    total = sum(parameter.numel() for parameter in model.parameters())
    model = prepare_pippy(model, example_args=(tokens[:2],), num_chunks=options.num_chunks, gather_output=True)
    local = sum(parameter.numel() for parameter in model.parameters())
    state.print(f"split points: {', '.join(model.hf_split_points)}")
    state.print(f"rank 0 holds {local} of {total} parameters")
    for size in (6, 5):  # a batch that is not divisible by the number of chunks is padded, and the output trimmed
        logits = model(tokens[:size]).logits
        difference = (logits.cpu() - expected[:size]).abs().max().item()
        state.print(
            f"batch of {size}: logits of shape {tuple(logits.shape)}, equal to those of the full model: "
            f"{difference < 1e-5}"
        )
    state.destroy_process_group()


if __name__ == "__main__":
    main()

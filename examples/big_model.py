"""Run a language model from its checkpoint on disk, with less memory than its weights take.

    python examples/big_model.py
    python examples/big_model.py --checkpoint /a/directory --memory 4GB

Without --checkpoint, the script writes a GPT-2 checkpoint with random weights.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import torch

from accel_bigmodel import describe_device_map, init_empty_weights, load_checkpoint_and_dispatch


def make_checkpoint(folder: Path, layers: int, width: int) -> None:
    """Write a sharded GPT-2 checkpoint with random weights."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=layers, n_embd=width, n_head=width // 64, vocab_size=5000, bos_token_id=0, eos_token_id=0
    )
    GPT2LMHeadModel(config).save_pretrained(folder, max_shard_size="50MB")


def main(checkpoint: Path, memory: str, tokens: int) -> None:
    """Load the model, and generate tokens."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(checkpoint))
    begin = time.perf_counter()
    # The modules that must not be split are given by the model's _no_split_modules.
    model = load_checkpoint_and_dispatch(model, checkpoint, device_map="sequential", max_memory={"cpu": memory}).eval()
    print(f"loaded in {time.perf_counter() - begin:.2f} s")
    print(describe_device_map(model))
    prompt = torch.arange(1, 9).unsqueeze(0)
    with torch.no_grad():
        output = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=tokens, do_sample=False)
    generated = output[0, prompt.shape[1] :].tolist()
    print(f"generated {len(generated)} tokens: {generated}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", type=Path, help="directory of a causal language model of Transformers")
    parser.add_argument("--memory", default="60MB", help="memory for the weights")
    parser.add_argument("--tokens", type=int, default=4, help="number of tokens to generate")
    parser.add_argument("--layers", type=int, default=8, help="layers of the model without --checkpoint")
    parser.add_argument("--width", type=int, default=512, help="hidden size of the model without --checkpoint")
    arguments = parser.parse_args()
    if arguments.checkpoint is not None:
        main(arguments.checkpoint, arguments.memory, arguments.tokens)
    else:
        with tempfile.TemporaryDirectory() as directory:
            make_checkpoint(Path(directory), arguments.layers, arguments.width)
            main(Path(directory), arguments.memory, arguments.tokens)

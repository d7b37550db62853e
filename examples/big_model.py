"""Run a language model from its checkpoint on the disk, in less memory than its weights take.

    python examples/big_model.py
    python examples/big_model.py --checkpoint /a/folder --memory 4GB

Without a checkpoint of your own the script writes one of GPT-2's shape with random weights.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import torch

from accel_bigmodel import describe_device_map, init_empty_weights, load_checkpoint_and_dispatch


def make_checkpoint(folder: Path, layers: int, width: int) -> None:
    """Write a model of GPT-2's family with random weights, in shards."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=layers, n_embd=width, n_head=width // 64, vocab_size=5000, bos_token_id=0, eos_token_id=0
    )
    GPT2LMHeadModel(config).save_pretrained(folder, max_shard_size="50MB")


def main(checkpoint: Path, memory: str, tokens: int) -> None:
    """Load the model, and let it write."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(checkpoint))
    begin = time.perf_counter()
    # The model says itself which of its modules must stay whole.
    model = load_checkpoint_and_dispatch(model, checkpoint, device_map="sequential", max_memory={"cpu": memory}).eval()
    print(f"loaded in {time.perf_counter() - begin:.2f} s")
    print(describe_device_map(model))
    prompt = torch.arange(1, 9).unsqueeze(0)
    with torch.no_grad():
        written = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=tokens, do_sample=False)
    print(f"wrote {written.shape[1] - prompt.shape[1]} tokens: {written[0, prompt.shape[1] :].tolist()}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", type=Path, help="a folder with a causal language model of transformers")
    parser.add_argument("--memory", default="60MB", help="what its weights may take of the memory")
    parser.add_argument("--tokens", type=int, default=4, help="how many to write")
    parser.add_argument("--layers", type=int, default=8, help="of the model that is made where no checkpoint is given")
    parser.add_argument("--width", type=int, default=512, help="likewise")
    given = parser.parse_args()
    if given.checkpoint is not None:
        main(given.checkpoint, given.memory, given.tokens)
    else:
        with tempfile.TemporaryDirectory() as made:
            make_checkpoint(Path(made), given.layers, given.width)
            main(Path(made), given.memory, given.tokens)

"""Generate text for a list of prompts on several processes.

    accel launch --cpu --num_processes 2 examples/distributed_inference/text.py

`split_between_processes` gives each rank its part of the prompts, and `gather_object` collects the results in order.
Each rank has the full model: for one that does not fit on a device see ../big_model.py and ../pipelined_inference.py.
The model is a small GPT-2 with random weights; use `from_pretrained` for a real one.
"""

from __future__ import annotations

import hashlib

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from accel import PartialState
from accel.utils import gather_object, set_seed

PROMPTS = ["The cat", "Beautiful is better than", "One", "In the face of ambiguity", "Now"]


def main() -> None:
    state = PartialState()
    set_seed(0)
    config = GPT2Config(
        vocab_size=128, n_positions=64, n_embd=32, n_head=2, n_layer=2, bos_token_id=0, eos_token_id=None
    )
    model = GPT2LMHeadModel(config).eval().to(state.device)
    model.generation_config.pad_token_id = 0

    with state.split_between_processes(PROMPTS) as prompts:
        texts = []
        for prompt in prompts:
            tokens = torch.tensor([list(prompt.encode())], device=state.device)
            output = model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=8, do_sample=False)
            texts.append(prompt + "".join(map(chr, output[0, tokens.shape[1] :].tolist())))
    everything = gather_object(texts)
    assert len(everything) == len(PROMPTS)
    state.print(f"{len(texts)} prompts on rank 0, {len(everything)} in all")
    state.print("checksum:", hashlib.sha256("".join(everything).encode()).hexdigest()[:12])
    state.destroy_process_group()


if __name__ == "__main__":
    main()

"""accel-plan with a model that is not built in: its figures are the bytes that plain PyTorch holds, and DDP sends."""

import contextlib
import io
import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from accel_plan.command import run

RANKS = 2
TOKENS = 16
CONFIGURATIONS = {
    "ddp": "distributed_type: MULTI_CPU\nuse_cpu: true\n",
    "fsdp2": "distributed_type: FSDP\nuse_cpu: true\nfsdp_config:\n  fsdp_version: 2\n"
    "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n",
}


def plan(name: str, rank: int) -> dict:
    """What `accel plan` prints for one of the ranks."""
    Path(f"{name}.yaml").write_text(CONFIGURATIONS[name])
    words = [f"{name}.yaml", "--model", "qwen", "--num_processes", str(RANKS), "--rank", str(rank)]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert run([*words, "--seq_length", str(TOKENS), "--json"]) == 0
    return json.loads(printed.getvalue())


def size(tensors) -> int:
    """Bytes of tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


config = Qwen3Config(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=64,
    architectures=["Qwen3ForCausalLM"],
)
config.save_pretrained("qwen")
model = AutoModelForCausalLM.from_config(config)
optimizer = torch.optim.AdamW(model.parameters())
tokens = torch.arange(TOKENS)[None]
model(input_ids=tokens, labels=tokens).loss.backward()
optimizer.step()
weights = size(model.parameters())
gradients = size(parameter.grad for parameter in model.parameters())
states = [value for state in optimizer.state.values() for name, value in state.items() if name != "step"]

alone = plan("ddp", 0)
memory = alone["memory"]
assert alone["parameters"] == sum(parameter.numel() for parameter in model.parameters())
assert (memory["weights"], memory["gradients"], memory["optimizer"]) == (weights, gradients, size(states)), memory
reduced = sum(each["payload"] for each in alone["collectives"] if each["kind"] == "all-reduce")
# DDP's reducer averages each gradient once; a few bytes more synchronise its buckets and the loss.
assert gradients <= reduced < 1.01 * gradients, (gradients, alone["collectives"])
print("Qwen3 of Transformers in DDP: the bytes that plain PyTorch holds; each gradient is reduced once")
shards = [plan("fsdp2", rank)["memory"] for rank in range(RANKS)]
for part, whole in (("weights", weights), ("gradients", gradients), ("optimizer", size(states))):
    assert sum(shard[part] for shard in shards) == whole, (part, shards)
print("in FSDP 2: the shards of both ranks add up to it")

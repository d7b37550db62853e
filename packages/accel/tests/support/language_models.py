"""Small language models, their data, and their training in one process of plain PyTorch, which runs on any mesh must
equal.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from windows import plain_windows

from accel.fsdp.plugin import FullyShardedDataParallelPlugin

VOCABULARY, LENGTH, BATCH = 16, 16, 8


def llama(layers: int = 2, tied: bool = False) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, int] = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24}
    sizes |= {"num_hidden_layers": layers, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=tied))


def gpt2(layers: int = 2) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes: dict[str, int] = {"vocab_size": VOCABULARY, "n_positions": 64, "n_embd": 16, "n_layer": layers, "n_head": 4}
    sizes |= {"bos_token_id": 1, "eos_token_id": 2}
    return GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0))


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        turned = [
            torch.view_as_real(torch.view_as_complex(part.unflatten(-1, (-1, 2))) * turns).flatten(-2)
            for part in (q, k)
        ]
        return self.out(functional.scaled_dot_product_attention(*turned, v, is_causal=True).transpose(1, 2).flatten(-2))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.attention = Attention(width, heads)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm(x), turns)
        return x + self.down(functional.silu(self.up(x)))


class Own(nn.Module):
    """A model of no library, with rotary positions from a table: ``[length, head / 2]``, complex."""

    _no_split_modules = ("Block",)

    def __init__(self, layers: int = 2, width: int = 16, heads: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList([Block(width, heads) for _ in range(layers)])
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        angles = torch.outer(torch.arange(LENGTH), 10.0 ** -torch.arange(0, 1, 2 * heads / width))
        self.register_buffer("turns", torch.polar(torch.ones_like(angles), angles), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.turns)
        return self.head(self.norm(x))


MODELS: dict[str, Callable[..., nn.Module]] = {"llama": llama, "gpt2": gpt2, "own": Own}


def build(kind: str, **settings: Any) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[kind](**settings)


def dataset(steps: int, batch: int = BATCH) -> list[dict[str, torch.Tensor]]:
    """Samples in order: tokens, and labels that leave out what a real collator would, unevenly over samples and
    positions.
    """
    generator = torch.Generator().manual_seed(3)
    # Counting up from a random start, so that there is something to learn.
    starts = torch.randint(0, VOCABULARY, (steps * batch, 1), generator=generator)
    tokens = (starts + torch.arange(LENGTH)) % VOCABULARY
    labels = tokens.clone()
    for sample, keep in enumerate(
        torch.randint(LENGTH // 2, LENGTH + 1, (steps * batch,), generator=generator).tolist()
    ):
        labels[sample, keep:] = -100
    return [{"input_ids": one, "labels": other} for one, other in zip(tokens, labels, strict=True)]


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    # Gradients that are zero but for rounding (of the biases of attention's keys) must stay small beside eps, or Adam
    # makes steps of them.
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-6)


def sharding(sizes: dict[str, int]) -> FullyShardedDataParallelPlugin | None:
    """Where a mesh shards: in units, whose activations are computed twice."""
    if "dp_shard_size" not in sizes:
        return None
    return FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", activation_checkpointing=True
    )


def stack(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}


def shifted_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The mean cross entropy of next tokens."""
    return functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten())


def loss_of(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    if isinstance(model, Own):
        return shifted_loss(model(batch["input_ids"]), batch["labels"])
    loss: torch.Tensor = model(**batch).loss
    return loss


def plain(
    kind: str, steps: int, window: int = 1, max_norm: float = 0.5, parts: int = 1, **settings: Any
) -> dict[str, Any]:
    """Train in one process: the loss of a step is the mean over its ``window * parts`` batches, as under DDP."""
    model, samples, size = build(kind, **settings), dataset(steps * window), BATCH // parts
    windows = (
        [stack(samples[start : start + size]) for start in range(begin, begin + BATCH * window, size)]
        for begin in range(0, len(samples), BATCH * window)
    )
    return plain_windows(model, [optimizer_of(model)], windows, loss_of, max_norm)

"""A small language model that is sharded in blocks."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

WIDTH, VOCABULARY = 7, 11
BLOCKS = {"auto_wrap_policy": "transformer_based_wrap"}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + functional.gelu(self.linear(self.norm(x)))


class Net(nn.Module):
    """With tied embeddings, a buffer, and sizes that no number of ranks divides."""

    _no_split_modules = ("Block",)

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.ones(1))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x) * self.scale


def batches(count: int) -> tuple[torch.Tensor, ...]:
    return torch.randint(0, VOCABULARY, (count * 8, 5), generator=torch.Generator().manual_seed(1)).split(8)


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

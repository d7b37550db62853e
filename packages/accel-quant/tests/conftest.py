from __future__ import annotations

import pytest
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    """Embedding, blocks, and an output layer: 5 linear layers, of which the last one is left as it is."""

    def __init__(self, width: int = 64, blocks: int = 2, classes: int = 10) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, classes)
        self.register_buffer("scale", torch.ones(1))

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x) * self.scale


@pytest.fixture(autouse=True)
def known_seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def build():
    def make(**kwargs) -> Model:
        torch.manual_seed(0)
        return Model(**kwargs).eval()

    return make


@pytest.fixture
def tokens():
    return torch.randint(0, 50, (3, 7), generator=torch.Generator().manual_seed(1))

"""A small character-level language model, trained on texts of the Python standard library."""

from __future__ import annotations

import pydoc_data.topics
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

LETTERS = 128
LENGTH = 32


def text() -> Tensor:
    """Python's own reference manual, as character codes."""
    topics = "\n".join(topic for _, topic in sorted(pydoc_data.topics.topics.items()))
    return torch.tensor([ord(letter) for letter in topics if ord(letter) < LETTERS])


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        n, length, width = x.shape
        query, key, value = (
            part.view(n, length, self.heads, -1).transpose(1, 2)
            for part in self.qkv(self.before_attention(x)).split(width, dim=-1)
        )
        attended = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(n, length, width))
        return x + self.down(nn.functional.gelu(self.up(self.before_mlp(x))))


class LanguageModel(nn.Module):
    """Letters in, logits of the next letter out."""

    def __init__(self, width: int = 64, blocks: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(LETTERS, width), nn.Embedding(LENGTH, width)
        self.into = nn.Linear(width, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(blocks)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, LETTERS)

    def forward(self, letters: Tensor) -> Tensor:
        x = self.into(self.letters(letters) + self.places.weight[: letters.shape[1]])
        return self.head(self.norm(self.blocks(x)))


class Trainer:
    """A training run that can be stopped and resumed.

    Args:
        model: the model.
        context: what opens the block of a forward pass.
    """

    def __init__(self, model: nn.Module, context: Callable[[], AbstractContextManager[Any]], batch: int = 16) -> None:
        self.model, self.context, self.batch = model, context, batch
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        self.text = text()

    def loss(self, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(step)
        starts = torch.randint(len(self.text) - LENGTH - 1, (self.batch, 1), generator=generator)
        window = self.text[starts + torch.arange(LENGTH + 1)]
        with self.context():
            logits = self.model(window[:, :-1])
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), window[:, 1:].flatten())

    def run(self, first: int, last: int) -> list[float]:
        losses = []
        for step in range(first, last):
            loss = self.loss(step)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses

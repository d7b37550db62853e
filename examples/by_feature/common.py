"""Data and models that the examples of this directory share; nothing here is specific to accel."""

from __future__ import annotations

import codecs
import contextlib
import io

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from accel import Accelerator


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Handwritten digits of 8x8 pixels: 1437 to train on, 360 to test on."""
    images, labels = load_digits(return_X_y=True)
    data = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
    return TensorDataset(*(part[:1437] for part in data)), TensorDataset(*(part[1437:] for part in data))


def digit_loaders(batch_size: int = 32) -> tuple[DataLoader, DataLoader]:
    """A training and a test loader. The test batches hold 50 samples, so the last one is short."""
    train_set, test_set = digits()
    return DataLoader(train_set, batch_size=batch_size, shuffle=True), DataLoader(test_set, batch_size=50)


def digit_model(width: int = 32) -> nn.Module:
    """Pixels of shape (N, 64) to logits of shape (N, 10)."""
    return nn.Sequential(nn.Linear(64, width), nn.GELU(), nn.Linear(width, 10))


def train_epoch(
    accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader
) -> None:
    """One epoch of the usual loop."""
    model.train()
    for images, labels in loader:
        with accelerator.accumulate(model):
            accelerator.backward(functional.cross_entropy(model(images), labels))
            optimizer.step()
            optimizer.zero_grad()


def evaluate(accelerator: Accelerator, model: nn.Module, loader: DataLoader) -> float:
    """The accuracy over the full data set, on every rank."""
    model.eval()
    correct = total = 0
    for images, labels in loader:
        with torch.no_grad():
            predictions = model(images).argmax(dim=1)
        predictions, labels = accelerator.gather_for_metrics((predictions, labels))
        correct += int((predictions == labels).sum())
        total += len(labels)
    return correct / total


def zen() -> torch.Tensor:
    """The Zen of Python as bytes: 856 numbers below 128, for language models of characters."""
    with contextlib.redirect_stdout(io.StringIO()):
        import this
    return torch.tensor(list(codecs.decode(this.s, "rot13").encode()))


class CharModel(nn.Module):
    """A recurrent language model: characters of shape (N, T) to logits of shape (N, T, 128)."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(128, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, 128)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.rnn(self.embedding(tokens))[0])


def tiny_llama() -> nn.Module:
    """A Llama of two blocks with random weights, which needs transformers and downloads nothing."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=128,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            attn_implementation="sdpa",
        )
    )


def zen_loader(batch_size: int = 4, length: int = 32) -> DataLoader:
    """The Zen of Python in sequences of ``length`` characters, as batches of ``input_ids`` and ``labels``."""
    rows = zen()[: 24 * length].reshape(24, length)
    return DataLoader([{"input_ids": row, "labels": row.clone()} for row in rows], batch_size=batch_size)

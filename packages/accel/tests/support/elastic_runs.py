"""Training runs with elastic loaders, for the tests: an MLP, a conv net with augmentation, and a GPT-2 with dropout."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from accel import Accelerator, DataLoaderConfiguration
from accel.fsdp.plugin import FullyShardedDataParallelPlugin
from accel_state import AcceleratorState
from accel_state.random import set_seed

EPOCHS = 2


@cache
def images() -> tuple[torch.Tensor, torch.Tensor]:
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    return torch.tensor(pixels[:110], dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(labels[:110])


class AugmentedDigits(Dataset):
    """Digits, shifted and with noise: numbers from torch's and python's generators."""

    def __init__(self) -> None:
        # Not in __getitem__: importing scikit-learn in a worker draws from python's generator.
        self.images, self.labels = images()

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        import random

        image = torch.roll(self.images[index], random.randint(-1, 1), dims=-1)
        return image + 0.1 * torch.randn_like(image), self.labels[index]


class DigitStream(IterableDataset):
    """The same, as a stream."""

    def __iter__(self) -> Iterator[Any]:
        digits = AugmentedDigits()
        return (digits[index] for index in range(len(digits)))


def mlp() -> tuple[nn.Module, Dataset, Callable[[nn.Module, Any], torch.Tensor]]:
    model = nn.Sequential(nn.Linear(64, 33), nn.GELU(), nn.Dropout(0.1), nn.Linear(33, 10))
    data = TensorDataset(images()[0].flatten(1), images()[1])
    return model, data, lambda net, batch: nn.functional.cross_entropy(net(batch[0]), batch[1])


def conv() -> tuple[nn.Module, Dataset, Callable[[nn.Module, Any], torch.Tensor]]:
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 10)
    )
    return model, AugmentedDigits(), lambda net, batch: nn.functional.cross_entropy(net(batch[0]), batch[1])


def gpt2() -> tuple[nn.Module, Dataset, Callable[[nn.Module, Any], torch.Tensor]]:
    import json  # whose documentation is text that ships with Python

    from transformers import GPT2Config
    from transformers.models.gpt2.modeling_gpt2 import GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=128, n_positions=16, n_embd=32, n_layer=2, n_head=2))
    text = torch.tensor([ord(character) % 128 for character in json.__doc__])
    data = TensorDataset(text[: 60 * 16].view(-1, 16))
    return model, data, lambda net, batch: net(input_ids=batch[0], labels=batch[0]).loss


MODELS = {"mlp": mlp, "conv": conv, "gpt2": gpt2}


class Run:
    """One training run; ``strategy`` is "ddp" (nothing special on one process) or "fsdp2"."""

    def __init__(
        self,
        name: str,
        strategy: str = "ddp",
        deterministic: bool = True,
        logical_shards: int = 8,
        workers: int = 0,
        lr: float = 3e-3,
        **loading: Any,
    ) -> None:
        AcceleratorState._reset_state()
        set_seed(11)
        sharding = {"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=2)} if strategy == "fsdp2" else {}
        self.accelerator = Accelerator(
            cpu=True,
            dataloader_config=DataLoaderConfiguration(
                elastic=True, logical_shards=logical_shards, data_seed=4, **loading
            ),
            deterministic_reduction=deterministic,
            **sharding,
        )
        model, data, self.loss = MODELS[name]()
        # Another seed on every rank: what follows must not depend on it.
        set_seed(50 + self.accelerator.process_index)
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        # Ranks of a test would each start a server for their workers, which imports torch.
        start = {"multiprocessing_context": "fork"} if workers else {}
        loader = DataLoader(data, batch_size=24, shuffle=True, num_workers=workers, **start)
        self.model, self.optimizer, self.scheduler, self.loader = self.accelerator.prepare(
            model, optimizer, scheduler, loader
        )
        self.losses: dict[tuple[int, int, int], float] = {}

    def train(
        self, stop: int | None = None, folder: Path | str = "", zero_first: bool = False, epochs: int = EPOCHS
    ) -> Run:
        """Train to the end of the last epoch, or save the state after ``stop`` micro batches."""
        done = 0
        while self.loader.iteration < epochs:
            for batch in self.loader:
                if zero_first:
                    self.optimizer.zero_grad()
                loss = self.loss(self.model, batch)
                self.accelerator.backward(loss)
                self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
                self.optimizer.step()
                self.scheduler.step()
                if not zero_first:
                    self.optimizer.zero_grad()
                shard = self.loader.logical_shard
                if shard.weight:
                    self.losses[shard.epoch, shard.position, shard.index] = loss.item()
                done += 1
                if done == stop:
                    self.accelerator.save_state(folder)
                    return self
        return self

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: value.clone() for name, value in self.accelerator.get_state_dict(self.model).items()}

    def digest(self) -> str:
        """The sha256 of names and values of weights and buffers; of nothing on ranks that do not have them."""
        digest = hashlib.sha256()
        for name, value in sorted(self.weights().items()):
            digest.update(name.encode() + value.cpu().numpy().tobytes())
        return digest.hexdigest()

"""Training runs for the tests of checkpoints: everything that a script prepares, and what to compare."""

from __future__ import annotations

import os
import random
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, StepLR
from torch.utils.data import DataLoader, Dataset, IterableDataset

from accel import Accelerator, DataLoaderConfiguration, ProjectConfiguration
from accel_checkpoint.manifest import MANIFEST_NAME
from accel_checkpoint.safe_load import MANIFEST_MARK
from accel_state.random import set_seed


class Noisy(Dataset):
    """Samples with noise from each of the process's generators, as augmentation has it.

    In worker processes there is none: their generators are not part of a state.
    """

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if torch.utils.data.get_worker_info() is not None:
            return torch.tensor(index), torch.full((4,), float(index) / 23)
        noise = random.random() + float(np.random.random()) + float(torch.rand(()))
        return torch.tensor(index), torch.full((4,), float(index) / 23) + 0.01 * noise


class Stream(IterableDataset):
    """The same samples, one after the other."""

    def __iter__(self) -> Iterator[Any]:
        return (Noisy()[index] for index in range(len(Noisy())))


class Counter:
    """A registered object."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {"count": 0, "mean": np.float64(0.5), "last": {1, 2}, "rows": np.arange(3)}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


class Evil:
    """Unpickling this makes a folder."""

    def __init__(self, mark: Path) -> None:
        self.mark = str(mark)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.mark,)


class Run:
    """Everything that a script prepares."""

    def __init__(self, seed: int = 0, workers: int = 0, stream: bool = False, **settings: Any) -> None:
        set_seed(seed, device_specific=True)
        self.accelerator = Accelerator(cpu=True, **settings)
        self.model: nn.Module = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        scheduler: LRScheduler = StepLR(optimizer, 3, gamma=0.5)
        how = "fork" if workers else None  # this module cannot be imported by name, as other ways need it
        data = Stream() if stream else Noisy()
        loader = DataLoader(data, batch_size=3, shuffle=not stream, num_workers=workers, multiprocessing_context=how)
        self.model, self.optimizer, self.scheduler, self.loader = self.accelerator.prepare(
            self.model, optimizer, scheduler, loader
        )
        self.counter = Counter()
        self.accelerator.register_for_checkpointing(self.counter)
        self.record: list[Any] = []

    def train(self, epochs: int, save: dict[tuple[int, int], str] | None = None, done: int = 0) -> list[Any]:
        """Train, and return what every step did; save states after the steps named by epoch and batch."""
        for epoch in range(done, epochs):
            for index, (ids, x) in enumerate(self.loader):
                loss = (self.model(x).squeeze(-1) - ids / 23).square().mean()
                self.accelerator.backward(loss)
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
                self.counter.state["count"] += 1
                drawn = random.random(), float(np.random.random()), float(torch.rand(()))
                self.record.append(
                    (ids.tolist(), loss.item(), drawn, self.scheduler.get_last_lr(), self.counter.state["count"])
                )
                if save and (epoch, index) in save:
                    self.accelerator.save_state(save[epoch, index])
        return self.record

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: value.clone() for name, value in self.accelerator.unwrap_model(self.model).state_dict().items()}


def in_one_process(settings: dict[str, Any]) -> dict[str, Any]:
    """Accelerator settings from what can be sent to a rank."""
    loaders = DataLoaderConfiguration(**settings.get("loaders", {}))
    chosen = {name: settings[name] for name in ("workers", "stream") if name in settings}
    return {**chosen, "mixed_precision": settings.get("mixed_precision", "no"), "dataloader_config": loaders}


def uninterrupted(
    settings: dict[str, Any], save: dict[tuple[int, int], str]
) -> tuple[list[Any], dict[str, torch.Tensor]]:
    run = Run(**in_one_process(settings))
    return run.train(3, save), run.weights()


def resumed(
    settings: dict[str, Any], folders: dict[tuple[int, int], str]
) -> list[tuple[list[Any], dict[str, torch.Tensor]]]:
    results = []
    for folder in folders.values():
        run = Run(seed=99, **in_one_process(settings))
        run.accelerator.load_state(folder)
        results.append((run.train(3, done=run.loader.iteration), run.weights()))
    return results


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def as_tensors(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: torch.as_tensor(value) for name, value in state.items() if value is not None}


def project(folder: Path, **settings: Any) -> ProjectConfiguration:
    return ProjectConfiguration(str(folder), automatic_checkpoint_naming=True, **settings)


def checkpoints(folder: Path) -> list[str]:
    return sorted(os.listdir(folder / "checkpoints"))


class Failing(Counter):
    """Fails to give its state, from some time on."""

    fails = False

    def state_dict(self) -> dict[str, Any]:
        if self.fails:
            raise KeyError("no state today")
        return self.state


FILES = (
    *("pytorch_model.bin", "optimizer.bin", "scheduler.bin", "sampler.bin", "scaler.pt", "random_states_0.pkl"),
    *("custom_checkpoint_0.pkl", "dl_state_dict.bin"),
)


def as_of_another_library(folder: Path) -> None:
    """Make a checkpoint one without a manifest, as other libraries write them: with the checksums of torch's files."""
    (folder / MANIFEST_NAME).unlink()
    for path in folder.iterdir():
        if path.is_file() and zipfile.is_zipfile(path):
            state = torch.load(path, weights_only=False)
            if path.match("random_states_*.pkl"):
                del state[MANIFEST_MARK]
            torch.save(state, path)

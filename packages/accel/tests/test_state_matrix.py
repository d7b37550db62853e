"""A state of any strategy continues in any other; what cannot be carried over is refused before anything is changed."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed_runs import MISSING, accelerator_of, config
from ft_runs import environment_of_replicas
from mesh_runs import BATCH, BLOCKS, TOLERANCE, batches, build, loss_of, optimizer_of
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader

from accel import (
    Accelerator,
    CheckpointError,
    DataLoaderConfiguration,
    FullyShardedDataParallelPlugin,
    ParallelismConfig,
)
from accel_state import AcceleratorState
from accel_state.testing import run_world

STEPS, STOP, MAX_NORM = 6, 3, 0.5
# The strategies by the number of their ranks. Replicas of "ft" are processes of their own: one of two is alive.
RANKS = {
    1: ("single", *(("ft",) if find_spec("torchft") else ()), *(() if MISSING else ("deepspeed",))),
    2: ("ddp", "fsdp1", "fsdp2", "tp2"),
}


def accelerator_for(strategy: str) -> Accelerator:
    """With the batches of a loader divided among the ranks, so that a schedule has as many steps everywhere."""
    AcceleratorState._reset_state()
    loading = {"dataloader_config": DataLoaderConfiguration(split_batches=True)}
    if strategy == "deepspeed":
        return accelerator_of(config(2), **loading)
    if strategy == "ft":
        return Accelerator(strategy="ft", **loading)
    if strategy == "tp2":
        return Accelerator(parallelism_config=ParallelismConfig(tp_size=2), **loading)
    if strategy.startswith("fsdp"):
        settings = {**BLOCKS, "fsdp_version": int(strategy[-1]), "state_dict_type": "SHARDED_STATE_DICT"}
        return Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(**settings), **loading)
    return Accelerator(**loading)


@pytest.fixture
def environment() -> Iterator[dict[str, str]]:
    """What the launcher gives to replicas, with the address of a lighthouse."""
    if not find_spec("torchft"):
        yield {}
        return
    with environment_of_replicas(join_seconds=0.1) as found:
        yield found


class Run:
    def __init__(self, strategy: str, seed: int) -> None:
        self.accelerator, self.is_replica = accelerator_for(strategy), strategy == "ft"
        model = build("own", seed)
        optimizer = optimizer_of(model)
        prepared = self.accelerator.prepare(
            model, optimizer, StepLR(optimizer, 2, gamma=0.5), DataLoader(batches(STEPS), batch_size=BATCH)
        )
        self.model, self.optimizer, self.scheduler, self.loader = prepared

    def train(self, folder: str = "") -> None:
        """Train to the end of the epoch, or to the step where the state is saved."""
        for tokens in self.loader:
            self.accelerator.backward(loss_of(self.model, tokens))
            if self.accelerator.sync_gradients:
                self.accelerator.clip_grad_norm_(self.model.parameters(), MAX_NORM)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            if folder and self.accelerator.sync_gradients and self.optimizer.steps_taken == STOP:
                self.accelerator.save_state(folder)
                return

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: value.clone() for name, value in self.accelerator.get_state_dict(self.model).items()}

    def end(self) -> None:
        if self.is_replica:
            self.accelerator.end_training()  # it leaves the other replicas
        self.accelerator.free_memory()


def save_all(folder: str, strategies: tuple[str, ...]) -> None:
    for strategy in strategies:
        run = Run(strategy, 0)
        run.train(f"{folder}/{strategy}")
        run.end()


def load_all(folder: str, strategies: tuple[str, ...], saved: tuple[str, ...]) -> dict[tuple[str, str], Any]:
    """The weights at the end of the epoch; or the message, if the state was refused and nothing has changed."""
    found: dict[tuple[str, str], Any] = {}
    for strategy in strategies:
        for state in saved:
            run = Run(strategy, 9)
            try:
                run.accelerator.load_state(f"{folder}/{state}")
            except CheckpointError as error:
                before = build("own", 9).state_dict()
                assert all(torch.equal(value, before[name]) for name, value in run.weights().items())
                assert run.optimizer.steps_taken == 0
                found[state, strategy] = str(error)
            else:
                run.train()
                found[state, strategy] = run.weights()
            run.end()
    return found


def plain() -> dict[str, torch.Tensor]:
    model = build("own")
    optimizer = optimizer_of(model)
    scheduler = StepLR(optimizer, 2, gamma=0.5)
    for tokens in batches(STEPS).split(BATCH):
        loss_of(model, tokens).backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return dict(model.state_dict())


@pytest.mark.slow  # seven ways of saving, and seven of loading each
@pytest.mark.timeout(400)
def test_every_state_continues_in_every_strategy(tmp_path: Path, environment: dict[str, str]) -> None:
    expected = plain()
    for world, strategies in RANKS.items():
        run_world(save_all, world, str(tmp_path), strategies, timeout=200, env=environment)
    saved = tuple(name for strategies in RANKS.values() for name in strategies)
    for world, strategies in RANKS.items():
        found = run_world(load_all, world, str(tmp_path), strategies, saved, timeout=300, env=environment)[0]
        assert len(found) == len(strategies) * len(saved)
        for (state, strategy), result in found.items():
            what = f"{state} into {strategy}"
            if (state == "deepspeed") is not (strategy == "deepspeed"):
                by = "was saved by DeepSpeed" if state == "deepspeed" else "was saved without DeepSpeed"
                assert isinstance(result, str) and by in result, what
                continue
            for name, value in expected.items():
                torch.testing.assert_close(
                    result[name], value, rtol=0, atol=TOLERANCE, msg=lambda text, what=what: f"{what}: {text}"
                )

"""Training scripts of several styles, interrupted after every step: they train every batch of a whole run once."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

from accel import Accelerator, DataLoaderConfiguration, ProjectConfiguration
from accel.utils import set_seed
from accel_state.testing import run_world

EPOCHS = 2
STEPS = 4  # per epoch


class Stop(Exception):
    """An interruption."""


class Script:
    """What a training script prepares, and its step, which saves the state."""

    def __init__(self, folder: Path, stop: str | None, seed: int, seedable: bool = False, accumulate: int = 1) -> None:
        set_seed(seed)
        self.folder, self.stop = folder, stop
        folder.mkdir(exist_ok=True)
        self.accelerator = Accelerator(
            cpu=True,
            gradient_accumulation_steps=accumulate,
            project_config=ProjectConfiguration(str(folder)),
            dataloader_config=DataLoaderConfiguration(use_seedable_sampler=seedable),
        )
        ranks = self.accelerator.num_processes
        data = TensorDataset(torch.linspace(-1, 1, 2 * STEPS * ranks)[:, None])
        model = nn.Sequential(nn.Linear(1, 4), nn.Dropout(0.3), nn.Linear(4, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(
            model, optimizer, DataLoader(data, batch_size=2, shuffle=True)
        )
        self.scheduler = StepLR(self.optimizer.optimizer, 1, gamma=0.5)
        self.accelerator.register_for_checkpointing(self.scheduler)
        self.steps = 0  # of the optimizer
        self.batches: list[list[float]] = []

    def step(self, batch: Any) -> None:
        with self.accelerator.accumulate(self.model):
            self.accelerator.backward(self.model(batch[0]).square().mean())
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.batches.append(batch[0].flatten().tolist())
        if self.accelerator.sync_gradients:
            self.steps += 1
            self.save(f"step_{self.steps}")

    def save(self, name: str) -> None:
        if name == self.stop:
            self.accelerator.save_state(self.folder / name)
            raise Stop

    def load(self, resume: Path | None) -> None:
        if resume is not None:
            self.accelerator.load_state(resume)
            self.steps = int(resume.name.removeprefix("step_"))

    def weights(self) -> list[float]:
        return [value for parameter in self.model.parameters() for value in parameter.detach().flatten().tolist()]


def skipping(script: Script, resume: Path | None) -> None:
    """The epoch and the batches to skip come from the name of the checkpoint, of a step or of an epoch."""
    start, skip = 0, None
    if resume is not None and resume.name.startswith("epoch_"):
        script.accelerator.load_state(resume)
        start = int(resume.name.removeprefix("epoch_")) + 1
        script.steps = start * len(script.loader)
    elif resume is not None:
        script.load(resume)
        start = script.steps // len(script.loader)
        skip = script.steps - start * len(script.loader)
    for epoch in range(start, EPOCHS):
        active = script.loader
        if epoch == start and skip is not None:
            active = script.accelerator.skip_first_batches(script.loader, skip)
        for batch in active:
            script.step(batch)
        script.save(f"epoch_{epoch}")


def plain(script: Script, resume: Path | None) -> None:
    """The epoch comes from the number of optimizer steps, and nothing is skipped."""
    script.load(resume)
    steps_per_epoch = len(script.loader) // script.accelerator.gradient_accumulation_steps
    for _ in range(script.steps // steps_per_epoch, EPOCHS):
        for batch in script.loader:
            script.step(batch)


def with_set_epoch(script: Script, resume: Path | None) -> None:
    """As with a DistributedSampler, every epoch is announced."""
    script.load(resume)
    for epoch in range(script.steps // len(script.loader), EPOCHS):
        script.loader.set_epoch(epoch)
        for batch in script.loader:
            script.step(batch)


def by_iteration(script: Script, resume: Path | None) -> None:
    """The epoch is that of the loader."""
    script.load(resume)
    for _ in range(script.loader.iteration, EPOCHS):
        for batch in script.loader:
            script.step(batch)


def by_resume(script: Script, resume: Path | None) -> None:
    """resume() finds the state, and the code after each epoch runs once per epoch."""
    assert script.accelerator.resume() == (resume is not None)
    script.steps = script.optimizer.steps_taken
    assert script.scheduler.last_epoch == script.loader.iteration
    for _ in range(script.loader.iteration, EPOCHS):
        for batch in script.loader:
            script.step(batch)
        script.scheduler.step()


def interrupt(loop: Callable[[Script, Path | None], None], folder: Path, stops: list[str], **settings: Any) -> None:
    """Run a script without an interruption, and with each of these; compare batches and weights."""
    whole = Script(folder / "whole", None, 0, **settings)
    loop(whole, None)
    assert len(whole.batches) == EPOCHS * STEPS
    for stop in stops:
        first = Script(folder / stop, stop, 0, **settings)
        with pytest.raises(Stop):
            loop(first, None)
        second = Script(folder / stop, None, 1, **settings)
        loop(second, folder / stop / stop)
        assert first.batches + second.batches == whole.batches, stop
        assert second.weights() == whole.weights(), stop
        assert second.steps == whole.steps


EVERY_STEP = [f"step_{step}" for step in range(1, EPOCHS * STEPS + 1)]


@pytest.mark.parametrize("loop", [skipping, plain, with_set_epoch, by_iteration])
def test_an_epoch_saved_in_its_last_step_is_followed_by_the_next(loop: Any, tmp_path: Path) -> None:
    interrupt(loop, tmp_path, [f"step_{STEPS}"])


@pytest.mark.slow  # many combinations; the test above has the position that is special
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("seedable", [False, True])
@pytest.mark.parametrize("loop", [skipping, plain, with_set_epoch, by_iteration, by_resume])
def test_interrupted_after_every_step(loop: Any, seedable: bool, tmp_path: Path) -> None:
    stops = [*EVERY_STEP, "epoch_0", "epoch_1"] if loop is skipping else EVERY_STEP
    interrupt(loop, tmp_path, stops, seedable=seedable)


@pytest.mark.slow  # interrupts a loop in every step; the test above has the position that is special
def test_steps_of_several_micro_batches(tmp_path: Path) -> None:
    interrupt(plain, tmp_path, EVERY_STEP[: EPOCHS * STEPS // 2], accumulate=2)


def on_two_ranks() -> None:
    with tempfile.TemporaryDirectory() as own:
        folder = Path(Accelerator(cpu=True).process_state.collectives.broadcast_object(own))
        for loop in (skipping, plain):
            (folder / loop.__name__).mkdir(exist_ok=True)
            interrupt(loop, folder / loop.__name__, ["step_3", f"step_{STEPS}", f"step_{EPOCHS * STEPS}"])
        Accelerator(cpu=True).wait_for_everyone()


@pytest.mark.slow  # the same on two processes, which adds the sharding of loaders only
def test_on_two_processes() -> None:
    run_world(on_two_ranks, 2)


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_an_epoch_without_remaining_batches_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    interrupt(by_resume, tmp_path, [f"step_{STEPS}"])
    assert "Resuming in epoch 0, of which all batches were handed out" in caplog.text

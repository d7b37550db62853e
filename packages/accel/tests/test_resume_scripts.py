"""Training scripts of several styles, interrupted after every step: they end with the weights of a whole run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

from accel import Accelerator, DataLoaderConfiguration, ProjectConfiguration
from accel.utils import set_seed

EPOCHS = 2
STEPS = 4  # per epoch


class Stop(Exception):
    """An interruption."""


class Script:
    """What a training script prepares, and its step, which saves the state."""

    def __init__(self, folder: Path, stop: int | None, seed: int, seedable: bool) -> None:
        set_seed(seed)
        self.folder, self.stop = folder, stop
        self.accelerator = Accelerator(
            cpu=True,
            project_config=ProjectConfiguration(str(folder)),
            dataloader_config=DataLoaderConfiguration(use_seedable_sampler=seedable),
        )
        data = TensorDataset(torch.linspace(-1, 1, 2 * STEPS)[:, None])
        model = nn.Sequential(nn.Linear(1, 4), nn.Dropout(0.3), nn.Linear(4, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(
            model, optimizer, DataLoader(data, batch_size=2, shuffle=True)
        )
        self.scheduler = StepLR(self.optimizer.optimizer, 1, gamma=0.5)
        self.accelerator.register_for_checkpointing(self.scheduler)
        self.steps = 0

    def step(self, batch: Any) -> None:
        loss = self.model(batch[0]).square().mean()
        self.accelerator.backward(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1
        if self.steps == self.stop:
            self.accelerator.save_state(self.folder / f"step_{self.steps}")
            raise Stop

    def weights(self) -> list[float]:
        return [value for parameter in self.model.parameters() for value in parameter.detach().flatten().tolist()]


def skipping(script: Script, resume: Path | None) -> None:
    """The epoch and the batches to skip come from the number of steps in the name of the checkpoint."""
    start, skip = 0, None
    if resume is not None:
        script.accelerator.load_state(resume)
        script.steps = int(resume.name.removeprefix("step_"))
        start, skip = divmod(script.steps, len(script.loader))
    for epoch in range(start, EPOCHS):
        active = script.loader
        if epoch == start and skip is not None:
            active = script.accelerator.skip_first_batches(script.loader, skip)
        for batch in active:
            script.step(batch)


def by_iteration(script: Script, resume: Path | None) -> None:
    """The epoch is that of the loader, and the code after each epoch runs once per epoch."""
    if resume is not None:
        script.accelerator.load_state(resume)
        script.steps = int(resume.name.removeprefix("step_"))
    for _ in range(script.loader.iteration, EPOCHS):
        for batch in script.loader:
            script.step(batch)
        script.scheduler.step()


def by_resume(script: Script, resume: Path | None) -> None:
    """resume() finds the state; epochs are counted by the registered scheduler."""
    assert script.accelerator.resume() == (resume is not None)
    script.steps = script.optimizer.steps_taken
    for _ in range(script.scheduler.last_epoch, EPOCHS):
        for batch in script.loader:
            script.step(batch)
        script.scheduler.step()


@pytest.mark.slow  # many processes or combinations; faster tests cover the feature
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize(
    ("loop", "seedable"),
    [
        (skipping, False),
        (skipping, True),
        (by_iteration, False),
        (by_iteration, True),
        (by_resume, False),
    ],
)
def test_interrupted_after_every_step(loop: Any, seedable: bool, tmp_path: Path) -> None:
    whole = Script(tmp_path / "whole", None, 0, seedable)
    (tmp_path / "whole").mkdir()
    loop(whole, None)
    assert whole.steps == EPOCHS * STEPS
    for stop in range(1, EPOCHS * STEPS + 1):
        folder = tmp_path / str(stop)
        folder.mkdir()
        first = Script(folder, stop, 0, seedable)
        with pytest.raises(Stop):
            loop(first, None)
        second = Script(folder, None, 1, seedable)
        loop(second, folder / f"step_{stop}")
        assert second.steps == whole.steps, stop
        assert second.weights() == whole.weights(), stop


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_an_epoch_without_remaining_batches_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = Script(tmp_path, STEPS, 0, False)
    with pytest.raises(Stop):
        by_iteration(first, None)
    second = Script(tmp_path, None, 1, False)
    by_iteration(second, tmp_path / f"step_{STEPS}")
    assert "Resuming in epoch 0, of which all batches were handed out" in caplog.text

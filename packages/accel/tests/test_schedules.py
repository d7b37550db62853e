"""Learning rate schedules: in one process those of torch, and on several ranks one step per batch of one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

from accel import Accelerator
from accel.scheduler import AcceleratedScheduler
from accel_state import context
from accel_state.testing import run_world

SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "OneCycleLR": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=5),
    "OneCycleLR, three phases": lambda optimizer: lr_scheduler.OneCycleLR(
        optimizer, max_lr=1.0, total_steps=5, three_phase=True
    ),
    "StepLR": lambda optimizer: lr_scheduler.StepLR(optimizer, 2),
    "MultiStepLR": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [1, 3]),
    "ConstantLR": lambda optimizer: lr_scheduler.ConstantLR(optimizer, total_iters=3),
    "LinearLR": lambda optimizer: lr_scheduler.LinearLR(optimizer, total_iters=3),
    "PolynomialLR": lambda optimizer: lr_scheduler.PolynomialLR(optimizer, total_iters=4),
    "ExponentialLR": lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.9),
    "CosineAnnealingLR": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 4),
    "CosineAnnealingWarmRestarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 2),
    "CyclicLR": lambda optimizer: lr_scheduler.CyclicLR(optimizer, 0.1, 1.0, 2),
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1)),
    "MultiplicativeLR": lambda optimizer: lr_scheduler.MultiplicativeLR(optimizer, lambda step: 0.9),
    "SequentialLR": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.LinearLR(optimizer, total_iters=2), lr_scheduler.CosineAnnealingLR(optimizer, 3)], [2]
    ),
    "ChainedScheduler": lambda optimizer: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(optimizer, total_iters=2), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    ),
    "SWALR": lambda optimizer: torch.optim.swa_utils.SWALR(optimizer, swa_lr=0.1, anneal_epochs=3),
}


def rates(make: Callable[[torch.optim.Optimizer], Any], accelerator: Accelerator | None) -> list[Any]:
    """The learning rates of six steps, and torch's error if there is one."""
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.5, momentum=0.9)
    scheduler = make(optimizer)
    stepping, scheduler = (optimizer, scheduler) if accelerator is None else accelerator.prepare(optimizer, scheduler)
    found: list[Any] = []
    for _ in range(6):
        stepping.step()
        try:
            scheduler.step()
        except ValueError as error:
            found.append(str(error))
        found.append(optimizer.param_groups[0]["lr"])
    return found


@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_schedule_of_torch_is_that_of_torch_in_one_process(name: str) -> None:
    assert rates(SCHEDULERS[name], Accelerator(cpu=True)) == rates(SCHEDULERS[name], None)


def fixed_length_and_metric() -> tuple[list[Any], float]:
    accelerator = Accelerator(cpu=True)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(
        torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0), factor=0.5, patience=1
    )
    plateau = accelerator.prepare(plateau)
    assert isinstance(plateau, AcceleratedScheduler)
    for _ in range(3):
        plateau.step(1.0)
    return rates(SCHEDULERS["OneCycleLR"], accelerator), plateau.scheduler.optimizer.param_groups[0]["lr"]


def test_a_schedule_of_fixed_length_ends_and_a_metric_scheduler_counts_calls() -> None:
    alone = rates(SCHEDULERS["OneCycleLR"], None)
    assert "5" in alone[-2]  # torch's error names the number of steps
    for found, rate in run_world(fixed_length_and_metric, 2):
        # Two steps per call. The third call stops at the end, and later ones change nothing.
        assert (found, rate) == ([alone[1], alone[3], *[alone[4]] * 4], 0.5)


METRICS = [(1.0, 3.0), (1.5, 2.0), (0.5, 3.5), (2.0, 1.0), (1.0, 2.5), (3.0, 0.0), (0.5, 0.5)]
"""Of two ranks at each evaluation: in their mean other ones are the best than on each rank."""


def plateau_rates(accelerator: Accelerator | None, of_rank: int | None, by_name: bool = False) -> list[float]:
    optimizer: Any = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)
    scheduler: Any = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    stepping = optimizer
    if accelerator is not None:
        stepping, scheduler = accelerator.prepare(optimizer, scheduler)
    found = []
    for pair in METRICS:
        metric = torch.tensor(pair).mean() if of_rank is None else pair[of_rank]
        stepping.step()
        scheduler.step(metrics=metric) if by_name else scheduler.step(metric)
        found.append(optimizer.param_groups[0]["lr"])
    return found


def rates_by_own_metrics() -> list[list[float]]:
    found = []
    for with_optimizer, by_name in ((True, False), (False, True)):
        with context.isolated():
            accelerator = Accelerator(cpu=True, step_scheduler_with_optimizer=with_optimizer)
            found.append(plateau_rates(accelerator, accelerator.process_index, by_name))
    return found


def test_ranks_with_metrics_of_their_own_have_the_rates_of_their_mean() -> None:
    expected = plateau_rates(None, None)
    alone = [plateau_rates(None, rank) for rank in range(2)]
    assert expected not in alone and alone[0] != alone[1]
    assert run_world(rates_by_own_metrics, 2) == [[expected] * 2] * 2


def test_a_schedule_that_counts_epochs_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(1, 1)
    loader = DataLoader(TensorDataset(torch.ones(6, 1)), batch_size=2)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    in_batches, in_epochs = (
        AcceleratedScheduler(schedule, optimizer, num_processes=2)
        for schedule in (
            lr_scheduler.ExponentialLR(optimizer.optimizer, 1.0),
            lr_scheduler.StepLR(optimizer.optimizer, 9),
        )
    )
    for _ in range(2):
        for (x,) in loader:
            accelerator.backward(model(x).sum())
            optimizer.step()
            in_batches.step()
        in_epochs.step()
    [message] = [record.getMessage() for record in caplog.records if "scheduler.step()" in record.getMessage()]
    assert "StepLR advances by 2 at each call" in message and "do not pass it to prepare()" in message


def rates_of_evaluations(folder: Path, every: int, resume_after: int, batches: int = 12) -> list[float]:
    """The rate after each micro batch, with evaluations between them, whose metric never improves.

    Windows have four micro batches. ``every=0`` calls the scheduler with the loss of each micro batch instead.
    """
    found: list[float] = []
    done = 0
    for last in dict.fromkeys((resume_after, batches)):
        with context.isolated():
            accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
            model = nn.Linear(1, 1)
            optimizer: Any = torch.optim.SGD(model.parameters(), lr=1.0)
            plateau: Any = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
            model, optimizer, plateau = accelerator.prepare(model, optimizer, plateau)
            if done:
                accelerator.load_state(folder)
            for number in range(done + 1, last + 1):
                with accelerator.accumulate(model):
                    accelerator.backward(model(torch.ones(2, 1)).sum())
                    optimizer.step()
                    optimizer.zero_grad()
                if not every or number % every == 0:
                    plateau.step(1.0)
                found.append(optimizer.param_groups[0]["lr"])
            accelerator.save_state(folder)
            done = last
    return found


@pytest.mark.parametrize("resume_after", [6, 7, 12])
def test_a_metric_scheduler_counts_evaluations_within_a_window(tmp_path: Path, resume_after: int) -> None:
    # After 5 micro batches and after 10; the first sets the best metric.
    assert rates_of_evaluations(tmp_path / "every 5", 5, resume_after) == [1.0] * 9 + [0.5] * 3
    # For each window, after 4, 8 and 12.
    assert rates_of_evaluations(tmp_path / "all", 0, resume_after) == [1.0] * 7 + [0.5] * 4 + [0.25]

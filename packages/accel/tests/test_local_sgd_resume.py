"""LocalSGD that is interrupted between two averages, when every rank has weights and momenta of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from accel import Accelerator, LocalSGD
from accel_state import context
from accel_state.testing import run_world

STEPS, PERIOD = 9, 3


def run(folder: Path, save_at: int, resume: str) -> list[torch.Tensor]:
    """The weights after all steps; ``resume`` loads the state before or within the block, or not at all."""
    with context.isolated():
        accelerator = Accelerator(cpu=True)
        torch.manual_seed(0)
        net = nn.Linear(6, 6)
        model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=0.05))
        if resume == "before":
            accelerator.load_state(folder)
        with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=PERIOD) as local:
            if resume == "within":
                accelerator.load_state(folder)
            for step in range(save_at if resume else 0, STEPS):
                if step == save_at and not resume:
                    accelerator.save_state(folder)
                x = torch.randn(4, 6, generator=torch.Generator().manual_seed(2 * step + accelerator.process_index))
                accelerator.backward(model(x).square().mean())
                optimizer.step()
                optimizer.zero_grad()
                local.step()
        return [parameter.detach() for parameter in net.parameters()]


def run_all(folder: Path) -> list[str]:
    wrong = []
    for save_at in (1, 3, 5):
        place = folder / str(save_at)
        expected = run(place, save_at, "")
        for resume in ("before", "within"):
            found = run(place, save_at, resume)
            if not all(map(torch.equal, found, expected)):
                wrong.append(f"saved at {save_at}, loaded {resume} the block")
    return wrong


def test_a_run_continues_between_two_averages(tmp_path: Path) -> None:
    for wrong in run_world(run_all, 2, tmp_path):
        assert not wrong


def without(folder: Path) -> bool:
    """Whether ranks have equal weights where a state of LocalSGD is loaded without it."""
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(6, 6))
    accelerator.load_state(folder)
    return bool(accelerator.gather(model.module.weight.detach()[None]).var(0).sum() == 0)


@pytest.mark.parametrize("ranks", [2, 3])
def test_other_runs_start_with_the_weights_of_rank_0(ranks: int, tmp_path: Path) -> None:
    run_world(run, 2, tmp_path / "state", 4, "")
    assert all(run_world(without, ranks, tmp_path / "state"))


def two_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))


def samples(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(2 * step + rank))


def with_a_layer_frozen(folder: Path, load: bool) -> list[torch.Tensor]:
    """The weights of a run whose first layer is frozen between two averages; with ``load`` from a state after that."""
    with context.isolated():
        accelerator = Accelerator(cpu=True)
        net = two_layers()
        model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9))
        if load:
            net[0].requires_grad_(False)
            accelerator.load_state(folder)
        with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=PERIOD) as local:
            for step in range(5 if load else 0, STEPS):
                if step == 5 and not load:
                    accelerator.save_state(folder)
                accelerator.backward(model(samples(step, accelerator.process_index)).square().mean())
                optimizer.step()
                optimizer.zero_grad()
                local.step()
                if step == 3:
                    net[0].requires_grad_(False)
        return [parameter.detach() for parameter in net.parameters()]


def run_with_a_layer_frozen(folder: Path) -> list[list[torch.Tensor]]:
    return [with_a_layer_frozen(folder, load) for load in (False, True)]


def test_weights_frozen_between_two_averages_are_averaged(tmp_path: Path) -> None:
    nets = [two_layers(), two_layers()]
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9) for net in nets]
    for step in range(STEPS):
        for rank, (net, optimizer) in enumerate(zip(nets, optimizers, strict=True)):
            optimizer.zero_grad()
            net(samples(step, rank)).square().mean().backward()
            optimizer.step()
            if step == 3:
                net[0].requires_grad_(False)
                net[0].zero_grad()
        if (step + 1) % PERIOD == 0:
            with torch.no_grad():
                for one, other in zip(*(net.parameters() for net in nets), strict=True):
                    one.copy_((one + other) / 2)
                    other.copy_(one)
    for runs in run_world(run_with_a_layer_frozen, 2, tmp_path):
        for found in runs:
            for weights, expected in zip(found, nets[0].parameters(), strict=True):
                torch.testing.assert_close(weights, expected.detach(), atol=1e-6, rtol=0)

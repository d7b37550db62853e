"""DDP with static_graph=True where the first backward pass would not synchronise gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from accel import Accelerator, LocalSGD
from accel.kwargs.ddp import DistributedDataParallelKwargs
from accel_data import DataLoaderConfiguration
from accel_state import context
from accel_state.errors import ConfigurationError
from accel_state.testing import run_world

STEPS, WINDOW = 3, 3


class Net(nn.Module):
    """Has a layer that is used twice, and one that is not used, as static graphs allow."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.twice, self.head, self.unused = (nn.Linear(6, 6).double() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.twice(torch.tanh(self.twice(x))))


def batch(step: int, ranks: int = 1, rank: int = 0) -> torch.Tensor:
    x = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
    return x.chunk(ranks)[rank]


def plain() -> list[torch.Tensor]:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS * WINDOW):
        (net(batch(step)).square().mean() / WINDOW).backward()
        if (step + 1) % WINDOW == 0:
            optimizer.step()
            optimizer.zero_grad()
    return [parameter.detach() for parameter in net.parameters()]


def accumulated(how: str, options: dict[str, Any]) -> list[torch.Tensor]:
    """The weights after windows of ``accumulate``, of ``no_sync``, or with an evaluation before the first."""
    steps = 1 if how == "no_sync" else WINDOW
    handler = DistributedDataParallelKwargs(static_graph=True, **options)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps, kwargs_handlers=[handler])
    net = Net()
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
    share = accelerator.num_processes, accelerator.process_index
    if how == "evaluated":
        model.eval()
        with torch.no_grad():
            model(batch(0))
        model.train()
    for step in range(STEPS * WINDOW):
        x = batch(step, *share)
        if how != "no_sync":
            with accelerator.accumulate(model):
                accelerator.backward(model(x).square().mean())
                optimizer.step()
                optimizer.zero_grad()
        elif (step + 1) % WINDOW:
            with accelerator.no_sync(model):
                accelerator.backward(model(x).square().mean() / WINDOW)
        else:
            accelerator.backward(model(x).square().mean() / WINDOW)
            optimizer.step()
            optimizer.zero_grad()
    return [parameter.detach() for parameter in net.parameters()]


CASES: list[tuple[str, dict[str, Any]]] = [
    ("accumulate", {}),
    ("accumulate", {"gradient_as_bucket_view": True}),
    ("accumulate", {"find_unused_parameters": True}),
    ("no_sync", {}),
    ("evaluated", {}),
]


def accumulate_all() -> list[list[torch.Tensor]]:
    found = []
    for how, options in CASES:
        with context.isolated():
            found.append(accumulated(how, options))
    return found


def test_the_first_window_is_that_of_one_process() -> None:
    expected = plain()
    for ranks in run_world(accumulate_all, 2):
        for (how, options), found in zip(CASES, ranks, strict=True):
            for value, right in zip(found, expected, strict=True):
                assert (value - right).abs().max() < 1e-12, (how, options)


def elastic(deterministic: bool, static: bool) -> list[torch.Tensor]:
    """The weights after an epoch of an elastic loader, whose micro batches make one step."""
    with context.isolated():
        accelerator = Accelerator(
            cpu=True,
            dataloader_config=DataLoaderConfiguration(elastic=True, logical_shards=4),
            deterministic_reduction=deterministic,
            kwargs_handlers=[DistributedDataParallelKwargs(static_graph=static)],
        )
        net = Net()
        del net.unused
        loader = torch.utils.data.DataLoader(torch.cat([batch(step) for step in range(2)]), batch_size=2)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        model, optimizer, loader = accelerator.prepare(net, optimizer, loader)
        for x in loader:
            accelerator.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        return [parameter.detach() for parameter in net.parameters()]


def elastic_all() -> list[list[list[torch.Tensor]]]:
    return [[elastic(deterministic, static) for static in (False, True)] for deterministic in (False, True)]


def test_elastic_steps_are_those_without_a_static_graph() -> None:
    for ranks in run_world(elastic_all, 2):
        for without, found in ranks:
            torch.testing.assert_close(found, without, rtol=0, atol=1e-12)


def refused() -> None:
    accelerator = Accelerator(cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(static_graph=True)])
    model = accelerator.prepare(Net())
    with pytest.raises(ConfigurationError, match="static_graph=True. synchronises the first step"):
        LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=2)
    accelerator.backward(model(batch(0)).mean())
    LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=2)


def unwrapped() -> None:
    for accumulates in (False, True):
        with context.isolated():
            handler = DistributedDataParallelKwargs(static_graph=True)
            steps = 2 if accumulates else 1
            accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps, kwargs_handlers=[handler])
            net = Net()
            model = accelerator.prepare(net)
            with (
                accelerator.accumulate(model),
                pytest.raises(ConfigurationError, match="first backward pass has to"),
            ):
                accelerator.backward(net(batch(0)).mean())


def test_a_graph_is_recorded_with_the_prepared_model() -> None:
    run_world(unwrapped, 2)


def test_a_graph_that_was_not_recorded_is_refused() -> None:
    run_world(refused, 2)

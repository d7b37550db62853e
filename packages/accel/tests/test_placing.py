"""Models are moved so that optimizers made before ``prepare`` and tied layers keep their parameters."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from accel import Accelerator
from accel.core.placing import move_in_place
from accel_state.context import isolated
from accel_state.errors import ConfigurationError


@pytest.fixture(autouse=True)
def torch_makes_new_parameters() -> Iterator[None]:
    """As devices do whose tensors cannot take the place of others."""
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    with isolated():
        yield
    torch.__future__.set_overwrite_module_params_on_conversion(False)


def _tied() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Tanh(), nn.Linear(4, 4, bias=False))
    model[2].weight = model[0].weight
    return model


def test_to_would_make_new_parameters() -> None:
    model = _tied()
    before = model[0].weight
    model.to("cpu")
    assert model[0].weight is not before


def test_an_optimizer_made_before_prepare_trains() -> None:
    x = torch.arange(8.0).reshape(2, 4)
    plain = _tied()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    plain(x).square().sum().backward()
    optimizer.step()

    accelerator = Accelerator(cpu=True)
    model = _tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.backward(model(x).square().sum())
    optimizer.step()
    assert torch.equal(model[0].weight, plain[0].weight)
    assert model[2].weight is model[0].weight


def test_parameters_that_cannot_be_exchanged_are_refused() -> None:
    model = _tied()
    model(torch.ones(1, 4)).sum().backward()
    loss = model(torch.ones(1, 4)).sum()  # the graph refers to the parameters
    with pytest.raises(ConfigurationError, match="Sequential"):
        move_in_place(model, torch.device("meta"))
    del loss

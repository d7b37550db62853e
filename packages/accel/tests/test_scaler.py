"""The loss scale that several optimizers and ranks share."""

from __future__ import annotations

import torch
from torch import nn

from accel.precision.scaler import SharedGradScaler
from accel_state import PartialState


def a_step(scaler: SharedGradScaler, gradient: float, count: int = 1) -> tuple[list[float], list[float]]:
    """Weights after a step of optimizers of one weight each, which were 1 before; and their gradients."""
    weights = [nn.Parameter(torch.ones(1)) for _ in range(count)]
    optimizers = [torch.optim.SGD([weight], lr=0.5) for weight in weights]
    for weight, optimizer in zip(weights, optimizers, strict=True):
        scaler.expect(optimizer)
        weight.grad = torch.full((1,), gradient * scaler.get_scale())
        scaler.step(optimizer)
    scaler.update()
    return [weight.item() for weight in weights], [weight.grad.item() for weight in weights if weight.grad is not None]


def make_scaler() -> SharedGradScaler:
    return SharedGradScaler("cpu", init_scale=8.0, growth_interval=1)


def test_an_overflow_of_another_rank_skips_the_step() -> None:
    scaler = make_scaler()
    scaler.scale(torch.ones(1))  # makes the scale's tensor
    asked: list[list[float]] = []

    def another_rank(found: torch.Tensor) -> torch.Tensor:
        asked.append(found.reshape(-1).tolist())
        return torch.maximum(found, torch.ones_like(found))

    scaler.over_ranks = another_rank
    assert a_step(scaler, 0.25) == ([1.0], [0.25]) and asked == [[0.0]]
    assert scaler.get_scale() == 4.0
    # A rank whose part has no gradient answers the others too, with one number.
    nothing = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.5)
    scaler.unscale_(nothing)
    assert asked == [[0.0], [0.0]]


def test_an_overflow_of_this_rank_is_told_and_one_of_none_is_a_step() -> None:
    scaler = make_scaler()
    scaler.scale(torch.ones(1))
    PartialState(cpu=True)
    scaler.share_overflow(PartialState())
    assert scaler.over_ranks is not None and scaler.over_ranks(torch.ones(1)).tolist() == [1.0]
    assert a_step(scaler, 0.25)[0] == [0.875] and scaler.get_scale() == 16.0
    scaler.forget()
    assert a_step(scaler, float("inf"))[0] == [1.0] and scaler.get_scale() == 8.0


def test_optimizers_that_are_forgotten_are_not_waited_for() -> None:
    scaler = make_scaler()
    scaler.scale(torch.ones(1))
    first, second = (torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.5) for _ in range(2))
    scaler.expect(first)
    scaler.expect(second)
    first.param_groups[0]["params"][0].grad = torch.ones(1)
    scaler.step(first)
    scaler.update()
    assert scaler.get_scale() == 8.0, "the second optimizer has not stepped"
    assert scaler.state_dict()["scale"] == 16.0, "a state that is saved has the update of the steps so far"
    scaler.forget()
    assert scaler.get_scale() == 16.0
    assert a_step(scaler, 0.25)[0] == [0.875] and scaler.get_scale() == 32.0


def test_a_scale_that_is_given_is_taken_at_once() -> None:
    scaler = make_scaler()
    scaler.scale(torch.ones(1))
    scaler.forget()
    assert scaler.get_scale() == 8.0, "no step, no update"
    scaler.expect(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.5))
    scaler.update(2.0)
    assert scaler.get_scale() == 2.0

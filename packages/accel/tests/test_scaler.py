"""The loss scale that several optimizers and ranks share."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from accel import Accelerator
from accel.precision.scaler import SharedGradScaler
from accel.utils import FullyShardedDataParallelPlugin, GradScalerKwargs
from accel_state import PartialState, context
from accel_state.testing import run_world


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


def two_nets() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)), nn.Linear(3, 1)]


def output(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.float16):
        found: torch.Tensor = net(x)
    return found.float()


LIMIT = 0.1  # of gradient norms


def inputs() -> torch.Tensor:
    return torch.randn(8, 6, 3, generator=torch.Generator().manual_seed(1))


def expected_weights(clips: bool, overflow_at: int | None) -> list[dict[str, Any]]:
    """The weights of plain torch, whose first net does not step in the window that overflows."""
    nets, xs = two_nets(), inputs()
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.2) for net in nets]
    for first in range(0, len(xs), 2):
        for net, optimizer in zip(nets, optimizers, strict=True):
            optimizer.zero_grad()
            for x in xs[first : first + 2]:
                ((output(net, x) - 1).square().mean() / 2).backward()
            if clips:
                nn.utils.clip_grad_norm_(net.parameters(), LIMIT)
            if not (net is nets[0] and overflow_at is not None and first <= overflow_at < first + 2):
                optimizer.step()
    return [net.state_dict() for net in nets]


def trained_weights(clips: bool, overflow_at: int | None, fsdp_version: int = 0) -> list[dict[str, Any]]:
    """Those of the Accelerator, whose scale changes after each step."""
    with context.isolated():
        plugin = FullyShardedDataParallelPlugin(fsdp_version=fsdp_version or 2, use_orig_params=True)
        accelerator = Accelerator(
            cpu=True,
            mixed_precision="fp16",
            gradient_accumulation_steps=2,
            kwargs_handlers=[GradScalerKwargs(init_scale=16.0, growth_interval=1)],
            fsdp_plugin=plugin if fsdp_version else None,
        )
        pairs: list[Any] = []
        for net in two_nets():
            pairs.append(accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.2)))
        for number, batch in enumerate(inputs()):
            x = batch.chunk(accelerator.num_processes)[accelerator.process_index]
            for index, (net, optimizer) in enumerate(pairs):
                with accelerator.accumulate(net):
                    overflows = number == overflow_at and index == 0
                    accelerator.backward((net(x) - 1).square().mean() * (1e30 if overflows else 1))
                    if clips:
                        accelerator.clip_grad_norm_(net.parameters(), LIMIT)
                    optimizer.step()
                    optimizer.zero_grad()
        return [dict(accelerator.get_state_dict(net)) for net, _ in pairs]


def compare(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    for weights, those in zip(found, expected, strict=True):
        for name, value in weights.items():
            torch.testing.assert_close(value, those[name], atol=1e-3, rtol=0, msg=name)


@pytest.mark.parametrize("clips", [True, False])
@pytest.mark.parametrize("overflow_at", [None, 3])
def test_the_scale_may_change_while_another_optimizer_accumulates(clips: bool, overflow_at: int | None) -> None:
    """The first steps, and the last losses of the second one's window are scaled after that."""
    compare(trained_weights(clips, overflow_at), expected_weights(clips, overflow_at))


def sharded_weights() -> list[list[dict[str, Any]]]:
    return [trained_weights(clips, 3, version) for version in (1, 2) for clips in (True, False)]


def test_so_may_that_of_gradients_which_are_sharded_later() -> None:
    """Until the end of a window, FSDP keeps whole gradients apart."""
    expected = [expected_weights(clips, 3) for clips in (True, False)] * 2
    for found, those in zip(run_world(sharded_weights, 2)[0], expected, strict=True):
        compare(found, those)


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_without_gradients_is_not_skipped(fused: bool) -> None:
    """As without a scaler, it changes no weights, and the schedule advances."""
    accelerator = Accelerator(cpu=True, mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=16.0)])
    nets = two_nets()
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.5, fused=fused) for net in nets]
    schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5) for optimizer in optimizers]
    prepared = accelerator.prepare(*nets, *optimizers, *schedulers)
    before = nets[1].weight.tolist()
    accelerator.backward(prepared[0](inputs()[0]).square().mean())
    for item in prepared[2:]:
        item.step()
    assert [optimizer.steps_taken for optimizer in prepared[2:4]] == [1, 1]
    assert not accelerator.optimizer_step_was_skipped and nets[1].weight.tolist() == before
    assert [scheduler.get_last_lr() for scheduler in prepared[4:]] == [[0.25], [0.25]]


def trained_on_the_first_rank(overflow_at: int | None) -> tuple[list[tuple[bool, int, list[float]]], float | None]:
    """What happened in three steps of a model of one weight, of which the other rank has no part."""
    with context.isolated():
        accelerator = Accelerator(
            cpu=True,
            mixed_precision="fp16",
            fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=1, use_orig_params=True),
            kwargs_handlers=[GradScalerKwargs(init_scale=64.0)],
        )
        net = nn.Linear(1, 1, bias=False)
        nn.init.ones_(net.weight)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.25)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
        model, optimizer, scheduler = accelerator.prepare(net, optimizer, scheduler)
        found = []
        for number in range(3):
            loss = model(torch.ones(1, 1)).sum()
            accelerator.backward(loss * (float("inf") if number == overflow_at else 1.0))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            found.append((optimizer.step_was_skipped, optimizer.steps_taken, scheduler.get_last_lr()))
        weight = accelerator.get_state_dict(model).get("weight")
        return found, None if weight is None else weight.item()


def every_training_on_the_first_rank() -> list[Any]:
    return [trained_on_the_first_rank(overflow_at) for overflow_at in (None, 1)]


def test_a_rank_without_gradients_steps_if_the_others_do() -> None:
    first, other = run_world(every_training_on_the_first_rank, 2)
    steps = [(False, 1, [0.0625]), (False, 2, [0.015625]), (False, 3, [0.00390625])]
    skips = [(False, 1, [0.0625]), (True, 1, [0.0625]), (False, 2, [0.015625])]
    assert [found for found, _ in first] == [found for found, _ in other] == [steps, skips]
    assert [weight for _, weight in first] == [1 - 0.25 * (1 + 1 / 4 + 1 / 16), 1 - 0.25 * (1 + 1 / 4)]

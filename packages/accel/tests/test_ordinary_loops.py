"""Loops that compute other numbers on several ranks than in one process, unless accel averages or refuses something."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from windows import copied

from accel import Accelerator
from accel.fsdp.plugin import FullyShardedDataParallelPlugin
from accel.kwargs.handlers import GradScalerKwargs
from accel.local_sgd import LocalSGD
from accel.parallel.config import ParallelismConfig, TorchTensorParallelConfig
from accel_state import context
from accel_state.errors import ConfigurationError
from accel_state.testing import run_world

RANKS, BATCH, STEPS = 2, 8, 4


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4))


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(STEPS, BATCH, 6, generator=generator), torch.randint(0, 4, (STEPS, BATCH), generator=generator)
    return list(zip(x, y, strict=True))


def step_with_closures(accelerator: Accelerator | None, value: Callable[[torch.Tensor], Any]) -> dict[str, Any]:
    """Train by LBFGS, whose line search compares the losses that the closure returns."""
    model: Any = net().double()  # because a line search amplifies rounding
    optimizer: Any = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, line_search_fn="strong_wolfe")
    rows = slice(None)
    if accelerator is not None:
        model, optimizer = accelerator.prepare(model, optimizer)
        count = BATCH // accelerator.num_processes
        rows = slice(accelerator.process_index * count, (accelerator.process_index + 1) * count)
    for batch in batches():
        x, y = batch[0][rows].double(), batch[1][rows]

        def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> Any:
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(x), y)
            loss.backward() if accelerator is None else accelerator.backward(loss)
            return value(loss)

        optimizer.step(closure)
    return copied(model.state_dict() if accelerator is None else accelerator.get_state_dict(model))


def with_losses_of_ranks() -> list[dict[str, Any]]:
    found = []
    for value in (lambda loss: loss, lambda loss: loss.item()):
        with context.isolated():
            found.append(step_with_closures(Accelerator(cpu=True), value))
    return found


def test_ranks_take_the_same_steps_with_losses_of_their_own() -> None:
    expected = step_with_closures(None, lambda loss: loss)
    for found in run_world(with_losses_of_ranks, RANKS):
        for weights in found:
            for name, value in expected.items():
                torch.testing.assert_close(weights[name], value, atol=1e-9, rtol=0, msg=name)


def part_of(batch: tuple[torch.Tensor, torch.Tensor], rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a rank's samples, which differ so much that line searches take other steps."""
    return (1 + 2 * rank) * batch[0][rank::RANKS].double(), batch[1][rank::RANKS]


def rank_alone(rank: int) -> tuple[int, list[torch.Tensor]]:
    """Return how often plain LBFGS calls the closure with one rank's samples, and the weights after it."""
    model, calls = net().double(), 0
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=12, line_search_fn="strong_wolfe")
    for batch in batches():
        x, y = part_of(batch, rank)

        def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
            nonlocal calls
            calls += 1
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)
    return calls, [parameter.detach() for parameter in model.parameters()]


def closures_apart() -> list[torch.Tensor]:
    accelerator = Accelerator(cpu=True)
    model, optimizer = net().double(), torch.optim.LBFGS
    model, optimizer = accelerator.prepare(
        model, optimizer(model.parameters(), lr=0.5, max_iter=12, line_search_fn="strong_wolfe")
    )
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=STEPS) as local_sgd:
        for batch in batches():
            x, y = part_of(batch, accelerator.process_index)

            def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
                optimizer.zero_grad()
                loss = functional.cross_entropy(model(x), y)
                accelerator.backward(loss)
                return loss

            optimizer.step(closure)
            local_sgd.step()
    return [parameter.detach() for parameter in model.parameters()]


def test_ranks_of_local_sgd_step_by_their_own_losses() -> None:
    """They call the closure as often as their own line search asks for."""
    (calls, first), (other_calls, second) = rank_alone(0), rank_alone(1)
    assert calls != other_calls
    for found in run_world(closures_apart, RANKS):
        for weights, one, other in zip(found, first, second, strict=True):
            torch.testing.assert_close(weights, (one + other) / 2, atol=1e-9, rtol=0)


def closures_that_accumulate(steps: int) -> torch.Tensor:
    """Step by a closure for each batch, or for each two of them."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps)
    model = net()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
    samples = batches() if steps > 1 else [batches()[i : i + 2] for i in range(0, STEPS, 2)]
    for batch in samples:
        parts = [batch] if steps > 1 else batch

        def closure(parts: Any = parts) -> torch.Tensor:
            loss = sum(functional.cross_entropy(model(x), y) for x, y in parts) / len(parts)
            accelerator.backward(loss)
            return loss

        with accelerator.accumulate(model):
            optimizer.step(closure)
            optimizer.zero_grad()
    return model[0].weight.detach()


def test_a_closure_does_not_lose_the_batches_of_a_window() -> None:
    with context.isolated(), pytest.raises(ConfigurationError, match="gradient_accumulation_steps=2: only the last"):
        closures_that_accumulate(2)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for first in range(0, STEPS, 2):
        optimizer.zero_grad()
        for x, y in batches()[first : first + 2]:
            (functional.cross_entropy(model(x), y) / 2).backward()
        optimizer.step()
    with context.isolated():
        torch.testing.assert_close(closures_that_accumulate(1), model[0].weight.detach(), atol=1e-6, rtol=0)


def test_a_closure_in_fp16_is_refused_unless_nothing_is_scaled() -> None:
    def train(accelerator: Accelerator | None) -> torch.Tensor:
        model: Any = net()
        optimizer: Any = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4)
        if accelerator is not None:
            model, optimizer = accelerator.prepare(model, optimizer)
        x, y = batches()[0]

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = functional.cross_entropy(model(x).float(), y)
            loss.backward() if accelerator is None else accelerator.backward(loss)
            return loss

        optimizer.step(closure)
        return next(model.parameters()).detach()

    with context.isolated(), pytest.raises(ConfigurationError, match=r"LBFGS\.step\(closure\) with .*'fp16'.*'bf16'"):
        train(Accelerator(cpu=True, mixed_precision="fp16"))  # which would train nothing, without an error
    with context.isolated():
        unscaled = Accelerator(cpu=True, mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(enabled=False)])
        torch.testing.assert_close(train(unscaled), train(None), atol=1e-6, rtol=0)


def hook(model: nn.Module) -> None:
    model[2].weight.register_hook(lambda gradient: 2 * gradient)  # type: ignore[index]


def hook_after_accumulation(model: nn.Module) -> None:
    model[2].weight.register_post_accumulate_grad_hook(lambda weight: weight.grad.mul_(2))  # type: ignore[index]


def embed(model: nn.Module) -> None:
    model.append(nn.Embedding(4, 2, max_norm=1.0))  # type: ignore[operator]


def accelerator_of(kind: str) -> Accelerator:
    version = {"FSDP 1": 1, "FSDP 2": 2}.get(kind)
    plugin = None if version is None else FullyShardedDataParallelPlugin(fsdp_version=version)
    plan = TorchTensorParallelConfig(plan={"0": "colwise", "2": "rowwise"})
    mesh = ParallelismConfig(tp_size=2, tp_handler=plan) if kind == "tp" else None
    return Accelerator(cpu=True, fsdp_plugin=plugin, parallelism_config=mesh)


def refuse() -> dict[str, str]:
    found = {}
    for kind in ("DDP", "FSDP 1", "FSDP 2", "tp"):
        for change in (hook, hook_after_accumulation, embed, torch.optim.LBFGS):
            with context.isolated():
                accelerator, model, optimizer = accelerator_of(kind), net(), torch.optim.SGD
                if isinstance(change, type):
                    optimizer = change
                else:
                    change(model)
                try:
                    accelerator.prepare(model, optimizer(model.parameters(), lr=0.1))
                except ConfigurationError as error:
                    found[f"{kind} {change.__name__}"] = str(error)
    for kind in ("FSDP 2", "tp"):
        with context.isolated():
            accelerator, model = accelerator_of(kind), net()
            prepared, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
            accelerator.unwrap_model(prepared)[2] = head = nn.Linear(16, 4)
            try:
                optimizer.add_param_group({"params": list(head.parameters())})
            except ConfigurationError as error:
                found[f"{kind} new head"] = str(error)
    for kind in ("FSDP 1", "FSDP 2"):
        for change in (hook, hook_after_accumulation):
            with context.isolated():
                accelerator = accelerator_of(kind)
                try:
                    change(accelerator.unwrap_model(accelerator.prepare(net())))
                except ConfigurationError as error:
                    found[f"{kind} late {change.__name__}"] = str(error)
    return found


def test_what_would_differ_is_refused() -> None:
    wanted = {f"{kind} embed": r"3 has max_norm=1\.0.*Set max_norm=None" for kind in ("DDP", "FSDP 1", "FSDP 2", "tp")}
    for kind in ("FSDP 1", "FSDP 2", "tp"):
        wanted[f"{kind} hook"] = wanted[f"{kind} hook_after_accumulation"] = r"2\.weight has a hook of register_hook"
        wanted[f"{kind} LBFGS"] = "LBFGS cannot be used with .*Use DDP"
    for kind in ("FSDP 2", "tp"):
        wanted[f"{kind} new head"] = r"2\.weight was added to the .* after prepare\(\)"
    for kind, late in (("FSDP 1", "hook"), ("FSDP 1", "hook_after_accumulation"), ("FSDP 2", "hook")):
        wanted[f"{kind} late {late}"] = r"register_\w*hook of 2\.weight would do nothing"
    found = run_world(refuse, RANKS, timeout=200)[0]
    assert found.keys() == wanted.keys()
    for name, message in wanted.items():
        with pytest.raises(ConfigurationError, match=message):
            raise ConfigurationError(found[name])

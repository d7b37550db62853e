"""zero_grad wherever a loop calls it, and steps that are skipped: each loop ends with the weights of plain PyTorch."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from accel import (
    Accelerator,
    DataLoaderConfiguration,
    DeepSpeedPlugin,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
)
from accel_state import context
from accel_state.testing import run_world

BATCHES = 7
ROWS = 4
"""Samples in a micro batch of all ranks."""


def batches() -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(BATCHES * ROWS, 3)


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)


def weights(*models: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for model in models for parameter in model.parameters()])


def plain(window: int, skipped: int | None = None, epochs: int = 2) -> torch.Tensor:
    """Large batches, each in one backward pass; the step of the window with this number is left out."""
    model = network()
    optimizer = momentum(model)
    number = 0
    for _ in range(epochs):
        for rows in batches().split(window * ROWS):
            optimizer.zero_grad()
            model(rows).square().mean().backward()
            if number != skipped:
                optimizer.step()
            number += 1
    return weights(model)


class Loop:
    """One micro batch, with zero_grad somewhere in it."""

    def __init__(self, accelerator: Accelerator, model: nn.Module, optimizer: Any, set_to_none: bool | None) -> None:
        self.accelerator, self.model, self.optimizer, self.set_to_none = accelerator, model, optimizer, set_to_none
        self.windows = 0
        self.skipped: int | None = None

    def clear(self) -> None:
        self.optimizer.zero_grad(set_to_none=self.set_to_none)

    def backward(self, rows: torch.Tensor) -> None:
        self.accelerator.backward(self.model(rows).square().mean())

    def step(self) -> None:
        if not self.accelerator.sync_gradients or self.windows != self.skipped:
            self.optimizer.step()
        self.windows += self.accelerator.sync_gradients

    def first(self, rows: torch.Tensor) -> None:
        with self.accelerator.accumulate(self.model):
            self.clear()
            self.backward(rows)
            self.step()

    def after_forward(self, rows: torch.Tensor) -> None:
        with self.accelerator.accumulate(self.model):
            loss = self.model(rows).square().mean()
            self.clear()
            self.accelerator.backward(loss)
            self.step()

    def last(self, rows: torch.Tensor) -> None:
        with self.accelerator.accumulate(self.model):
            self.backward(rows)
            self.step()
            self.clear()

    def both(self, rows: torch.Tensor) -> None:
        with self.accelerator.accumulate(self.model):
            self.clear()
            self.backward(rows)
            self.step()
            self.clear()

    def last_if_synchronised(self, rows: torch.Tensor) -> None:
        with self.accelerator.accumulate(self.model):
            self.backward(rows)
            if self.accelerator.sync_gradients:
                self.step()
                self.clear()

    def before_the_block(self, rows: torch.Tensor) -> None:
        self.clear()
        with self.accelerator.accumulate(self.model):
            self.backward(rows)
            self.step()

    def after_the_block(self, rows: torch.Tensor) -> None:
        with self.accelerator.accumulate(self.model):
            self.backward(rows)
            self.step()
        self.clear()


ORDERS = ["first", "after_forward", "last", "both", "last_if_synchronised", "before_the_block", "after_the_block"]


def train(
    order: str,
    window: int,
    set_to_none: bool | None = None,
    skipped: int | None = None,
    strategy: dict[str, Any] | None = None,
    each: bool = False,
) -> torch.Tensor:
    plugin = GradientAccumulationPlugin(num_steps=window, sync_each_batch=each)
    accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=plugin, **(strategy or {}))
    model = network()
    loader = DataLoader(batches(), batch_size=ROWS // accelerator.num_processes)
    if "deepspeed_plugin" in (strategy or {}):  # whose engine has its own kinds of parameters
        model, optimizer, loader = accelerator.prepare(model, momentum(model), loader)
    else:
        model = accelerator.prepare(model)
        optimizer, loader = accelerator.prepare(momentum(model), loader)
    loop = Loop(accelerator, model, optimizer, set_to_none)
    loop.skipped = skipped
    said: list[logging.LogRecord] = []
    logger, handler = logging.getLogger("accel.training.gradient_accumulation"), logging.NullHandler()
    handler.handle = said.append  # type: ignore[assignment]
    logger.addHandler(handler)
    for _ in range(2):
        for rows in loader:
            getattr(loop, order)(rows)
    logger.removeHandler(handler)
    assert not said, said  # FSDP, for one, moves gradients away for a while
    state = accelerator.get_state_dict(model)
    accelerator.end_training()
    return torch.cat([value.flatten() for value in state.values()]) if state else torch.empty(0)


@pytest.mark.parametrize("window", [1, 4])
@pytest.mark.parametrize("order", ORDERS)
def test_every_order_trains_as_plain_pytorch(order: str, window: int) -> None:
    for set_to_none in (None, False):
        torch.testing.assert_close(train(order, window, set_to_none), plain(window), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("order", ["first", "last", "both", "last_if_synchronised", "after_the_block"])
def test_gradients_of_a_step_that_the_loop_leaves_out_are_dropped(order: str, window: int) -> None:
    torch.testing.assert_close(train(order, window, skipped=1), plain(window, skipped=1), rtol=1e-5, atol=1e-6)


MORE = [("ddp", False), ("fsdp2", True)]


def every_order(strategy: dict[str, Any], each: bool) -> dict[str, torch.Tensor]:
    return {order: train(order, 3, strategy=strategy, each=each) for order in ORDERS}


@pytest.mark.parametrize(
    ("name", "each"),
    [("ddp", True), ("fsdp2", False), *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE)],
)
def test_two_ranks_train_as_one_process(name: str, each: bool) -> None:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap")
    strategy = {} if name == "ddp" else {"fsdp_plugin": plugin}
    for result in run_world(every_order, 2, strategy, each)[:1]:
        for order, found in result.items():
            torch.testing.assert_close(
                found, plain(3), rtol=1e-5, atol=1e-6, msg=lambda text, at=order: f"{at}: {text}"
            )


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
@pytest.mark.parametrize("order", ["first", pytest.param("both", marks=pytest.mark.slow)])
def test_deepspeed(order: str) -> None:
    plugin = DeepSpeedPlugin(zero_stage=1, gradient_accumulation_steps=3)
    found = run_world(train, 2, order, 3, None, None, {"deepspeed_plugin": plugin})[0]
    torch.testing.assert_close(found, plain(3), rtol=1e-4, atol=1e-5)


def left_early(strategy: dict[str, Any]) -> torch.Tensor:
    """Leave each epoch's loop in the middle of its second window, and clear the gradients before the next one."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3, **strategy)
    model = network()
    loader = DataLoader(batches(), batch_size=ROWS // accelerator.num_processes)
    model, optimizer, loader = accelerator.prepare(model, momentum(model), loader)
    other = accelerator.prepare(DataLoader(batches(), batch_size=1))
    for _ in range(3):
        optimizer.zero_grad()
        for number, rows in enumerate(loader, start=1):
            with accelerator.accumulate(model):
                accelerator.backward(model(rows).square().mean())
                optimizer.step()
            for _ in other:  # whose loop is over, and has no window
                break
            optimizer.zero_grad()
            if number == 5:
                break
    state = accelerator.get_state_dict(model)
    accelerator.end_training()
    return torch.cat([value.flatten() for value in state.values()]) if state else torch.empty(0)


def plain_left_early() -> torch.Tensor:
    model = network()
    optimizer = momentum(model)
    for _ in range(3):
        optimizer.zero_grad()
        model(batches()[: 3 * ROWS]).square().mean().backward()
        optimizer.step()
    return weights(model)


def test_between_loops_a_window_that_was_left_is_discarded() -> None:
    torch.testing.assert_close(left_early({}), plain_left_early(), rtol=1e-5, atol=1e-6)


NO_DEEPSPEED = pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")


@pytest.mark.parametrize("name", ["ddp", "fsdp2", pytest.param("zero1", marks=[pytest.mark.slow, NO_DEEPSPEED])])
def test_between_loops_two_ranks_discard_it(name: str) -> None:
    strategies: dict[str, dict[str, Any]] = {
        "ddp": {},
        "fsdp2": {"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap")},
    }
    if name == "zero1":
        strategies[name] = {"deepspeed_plugin": DeepSpeedPlugin(zero_stage=1, gradient_accumulation_steps=3)}
    found = run_world(left_early, 2, strategies[name])[0]
    torch.testing.assert_close(found, plain_left_early(), rtol=1e-4, atol=1e-5)


def two_optimizers(order: str, strategy: dict[str, Any] | None) -> torch.Tensor:
    """A generator and a critic, which both learn in each block, from losses that do not reach the other."""
    generator, critic = network(2), nn.Linear(1, 1)
    pair = [momentum(generator), momentum(critic)]
    rows, window = batches()[: 6 * ROWS], 3
    accelerated = strategy is not None
    if strategy is not None:
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=window, **strategy)
        generator, critic, *pair = accelerator.prepare(generator, critic, *pair)

    def learn(optimizer: Any, loss: torch.Tensor) -> None:
        if order != "last":
            optimizer.zero_grad()
        accelerator.backward(loss) if accelerated else loss.backward()
        if order != "first_if_synchronised" or not accelerated or accelerator.sync_gradients:
            optimizer.step()
        if order in ("last", "both"):
            optimizer.zero_grad()

    for block in rows.split(ROWS if accelerated else window * ROWS) * 2:
        with accelerator.accumulate(generator, critic) if accelerated else nullcontext():
            made = generator(block)
            learn(pair[0], (made - 1).square().mean())
            learn(pair[1], (critic(made.detach()) + 1).square().mean())
    return weights(generator, critic)


@pytest.mark.parametrize("order", ["first", "last", "both", "first_if_synchronised"])
def test_two_optimizers_in_one_block_clear_their_own_gradients(order: str) -> None:
    """The backward pass of the first model tells nothing of the gradients of the second."""
    expected = two_optimizers("last", None)
    torch.testing.assert_close(two_optimizers(order, {}), expected, rtol=1e-5, atol=1e-6)


def drop_with_two_optimizers(strategy: dict[str, Any] | None) -> torch.Tensor:
    """Two models in each block, whose second step is left out in the second window; zero_grad comes last."""
    models, window = [network(2), network(3)], 3
    optimizers = [momentum(model) for model in models]
    accelerated = strategy is not None
    if strategy is not None:
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=window, **strategy)
        prepared = list(accelerator.prepare(*models, *optimizers))
        models, optimizers = prepared[:2], prepared[2:]
    blocks = batches()[: 6 * ROWS].split(ROWS if accelerated else window * ROWS) * 2
    for number, block in enumerate(blocks):
        with accelerator.accumulate(*models) if accelerated else nullcontext():
            for model, optimizer in zip(models, optimizers, strict=True):
                loss = model(block).square().mean()
                accelerator.backward(loss) if accelerated else loss.backward()
                ends = accelerator.sync_gradients if accelerated else True
                if not (ends and optimizer is optimizers[1] and number // (window if accelerated else 1) == 1):
                    optimizer.step()
                optimizer.zero_grad()
    return weights(*models)


def test_the_second_of_two_optimizers_drops_gradients_without_a_step() -> None:
    torch.testing.assert_close(drop_with_two_optimizers({}), drop_with_two_optimizers(None), rtol=1e-5, atol=1e-6)


def two_engines() -> list[torch.Tensor]:
    plugin = DeepSpeedPlugin(zero_stage=0, gradient_accumulation_steps=3)  # other stages drop them without being told
    plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = ROWS
    found = []
    for train_both in (partial(two_optimizers, "first"), partial(two_optimizers, "both"), drop_with_two_optimizers):
        with context.isolated():
            found.append(train_both({"deepspeed_plugin": copy.deepcopy(plugin)}))
    return found


@pytest.mark.slow
@pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
def test_two_engines_in_one_block_clear_their_own_gradients() -> None:
    kept, dropped = two_optimizers("last", None), drop_with_two_optimizers(None)
    for found in run_world(two_engines, 2, timeout=200, state=False):
        for result, expected in zip(found, (kept, kept, dropped), strict=True):
            torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)


def test_clearing_the_model_in_a_block_warns_once(recwarn: pytest.WarningsRecorder, caplog) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = network()
    model, optimizer = accelerator.prepare(model, momentum(model))
    with caplog.at_level("WARNING"):
        for rows in batches().split(ROWS):
            with accelerator.accumulate(model):
                model.zero_grad()
                accelerator.backward(model(rows).mean())
                optimizer.step()
    said = [record.getMessage() for record in caplog.records] + [str(warning.message) for warning in recwarn]
    assert sum("model.zero_grad()" in text for text in said) == 1


def elastic(order: str) -> torch.Tensor:
    configuration = DataLoaderConfiguration(elastic=True, logical_shards=4)
    accelerator = Accelerator(cpu=True, dataloader_config=configuration)
    model = network()
    loader = DataLoader(batches()[: 6 * ROWS], batch_size=ROWS)
    model, optimizer, loader = accelerator.prepare(model, momentum(model), loader)
    loop = Loop(accelerator, model, optimizer, None)
    for rows in loader:
        getattr(loop, order)(rows)
    accelerator.end_training()
    return weights(model)


def test_elastic_loaders() -> None:
    expected = elastic("last")
    for order in ("first", "after_forward", "both"):
        assert torch.equal(elastic(order), expected), order


# -- steps that the scaler skips -------------------------------------------------------------------------------------


class Scaled(torch.optim.SGD):
    """Takes the scaler itself, as optimizers may that support loss scaling."""

    _step_supports_amp_scaling = True

    def step(self, closure: Any = None, grad_scaler: Any = None) -> None:
        grad_scaler._check_inf_per_device(self)
        if not any(found.item() for found in grad_scaler._found_inf_per_device(self).values()):
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.grad.div_(grad_scaler._get_scale_async())
            super().step()


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, fused=True),
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.1, fused=True),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, fused=True),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1, fused=True),
    "own": lambda parameters: Scaled(parameters, lr=0.1),
    "not fused": lambda parameters: torch.optim.SGD(parameters, lr=0.1, fused=False),
}


def overflows(name: str, clips: bool, on_rank: int | None) -> list[tuple[bool, bool, int]]:
    accelerator = Accelerator(mixed_precision="fp16", cpu=True)
    model = nn.Linear(2, 1)
    optimizer = OPTIMIZERS[name](model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    found = []
    for number in range(4):
        is_bad = number % 2 == 0 and on_rank in (None, accelerator.process_index)
        loss = model(torch.ones(1, 2)).float().sum() * (float("inf") if is_bad else 1.0)
        before = weights(model)
        accelerator.backward(loss)
        if clips:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        moved = float((weights(model) - before).abs().sum())
        found.append((accelerator.optimizer_step_was_skipped, moved > 0, optimizer.steps_taken))
    return found


EXPECTED = [(True, False, 0), (False, True, 1), (True, False, 1), (False, True, 2)]


@pytest.mark.filterwarnings("ignore:GradScaler is going to stop passing itself")
@pytest.mark.parametrize("clips", [False, True], ids=["", "clipped"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_that_the_scaler_skips_is_none(name: str, clips: bool) -> None:
    if name == "own" and clips:
        pytest.skip("it divides by the scale itself, once more")
    assert overflows(name, clips, None) == EXPECTED


def every_optimizer() -> list[list[Any]]:
    return [overflows(name, False, on_rank=1) for name in ("AdamW", "SGD", "not fused")]


def test_a_step_is_skipped_by_all_ranks() -> None:
    assert run_world(every_optimizer, 2) == [[EXPECTED] * 3] * 2

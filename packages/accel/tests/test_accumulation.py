"""Gradient accumulation against one big batch in plain PyTorch."""

from __future__ import annotations

import copy
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from accel import Accelerator, DataLoaderConfiguration, GradientAccumulationPlugin
from accel_state import ConfigurationError, context
from accel_state.env import patch_environment
from accel_state.testing import run_world


def build(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def data(length: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(length, 4, generator=generator, dtype=torch.float64)
    return TensorDataset(x, x.sum(1, keepdim=True).sin())


def gradients(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


class Stream(IterableDataset[Any]):
    """The same samples, without a length."""

    def __init__(self, dataset: TensorDataset) -> None:
        self.dataset = dataset

    def __iter__(self) -> Any:
        yield from (self.dataset[i] for i in range(len(self.dataset)))


def reference_run(length: int, batch: int, steps: int, world: int) -> list[torch.Tensor]:
    """Weights after each optimizer step of plain PyTorch, which sees each window (steps * world batches) as one mean of
    batch means.
    """
    model, samples = build(), data(length)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [samples[i : i + batch] for i in range(0, length, batch)]
    weights = []
    per_window = steps * world
    for start in range(0, len(batches), per_window):
        window = batches[start : start + per_window]
        loss = torch.stack([nn.functional.mse_loss(model(x), y) for x, y in window]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        weights.append(torch.cat([p.detach().flatten().clone() for p in model.parameters()]))
    return weights


def train(
    length: int, batch: int, steps: int, streaming: bool = False, sync_each_batch: bool = False
) -> list[torch.Tensor]:
    plugin = GradientAccumulationPlugin(num_steps=steps, sync_each_batch=sync_each_batch)
    accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
    model = build()
    dataset = Stream(data(length)) if streaming else data(length)
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(dataset, batch_size=batch)
    )
    weights = []
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.mse_loss(model(x), y))
            optimizer.step()
            if accelerator.sync_gradients:
                weights.append(torch.cat([p.detach().flatten().clone() for p in model.parameters()]))
            optimizer.zero_grad()
    return weights


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(("length", "steps"), [(24, 3), (28, 3), (4, 3), (20, 1), (20, 3), (56, 5)])
def test_windows_equal_one_big_batch_the_short_last_one_too(length: int, steps: int, streaming: bool) -> None:
    expected = reference_run(length, 4, steps, 1)
    actual = train(length, 4, steps, streaming)
    assert len(actual) == len(expected)
    for a, e in zip(actual, expected, strict=True):
        assert torch.allclose(a, e, atol=1e-12)


def train_in_world(world: int) -> None:
    # A number of batches that divides evenly, so that no rank is given samples twice.
    for batches, steps, each in ((6, 3, False), (4, 3, False), (5, 2, True), (2, 1, False)):
        length = 4 * world * batches
        expected = reference_run(length, 4, steps, world)
        actual = train(length, 4, steps, sync_each_batch=each)
        assert len(actual) == len(expected), (length, steps, len(actual), len(expected))
        for a, e in zip(actual, expected, strict=True):
            assert torch.allclose(a, e, atol=1e-12), (length, steps, (a - e).abs().max())


@pytest.mark.parametrize("world", [2, 4])
def test_windows_over_several_ranks_equal_one_big_batch(world: int) -> None:
    run_world(train_in_world, world, world)


def ragged(world: int, rank: int, steps: int) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    """For each window, this rank's micro batches: sequences of uneven numbers of tokens, some of them empty."""
    generator = torch.Generator().manual_seed(7)
    windows = []
    for _ in range(3):
        counts = torch.randint(0, 9, (world, steps), generator=generator).tolist()
        counts[0][0] = max(counts[0][0], 1)
        tokens = [[torch.randn(n, 4, generator=generator, dtype=torch.float64) for n in row] for row in counts]
        windows.append([(x, x.prod(1, keepdim=True)) for x in tokens[rank]])
    return windows


def token_weighted(steps: int, as_tensor: bool) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps)
    world, rank = accelerator.num_processes, accelerator.process_index
    plain = build()
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.05)
    model = build()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05))
    everyone = [ragged(world, r, steps) for r in range(world)]
    for index, window in enumerate(everyone[rank]):
        for x, y in window:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(x), y, reduction="sum")
                items = torch.tensor(len(x)) if as_tensor else len(x)
                accelerator.backward(loss, num_items=items, reduction="sum")
                if accelerator.sync_gradients:
                    together = [pair for r in range(world) for pair in everyone[r][index]]
                    big_x, big_y = torch.cat([x for x, _ in together]), torch.cat([y for _, y in together])
                    plain_optimizer.zero_grad()
                    nn.functional.mse_loss(plain(big_x), big_y).backward()
                    assert torch.allclose(gradients(model), gradients(plain), atol=1e-6), (
                        (gradients(model) - gradients(plain)).abs().max()
                    )
                    plain_optimizer.step()
                optimizer.step()
                optimizer.zero_grad()


def token_weighted_both() -> None:
    token_weighted(3, False)
    token_weighted(1, True)


@pytest.mark.parametrize("steps", [1, 4])
def test_gradients_weighed_by_items_equal_one_big_batch(steps: int) -> None:
    token_weighted(steps, as_tensor=False)
    token_weighted(steps, as_tensor=True)


@pytest.mark.parametrize("world", [2, 4])
def test_gradients_weighed_by_items_over_ranks(world: int) -> None:
    run_world(token_weighted_both, world)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 7])
def test_items_in_a_short_last_window(count: int) -> None:
    """The gradients of its sums are not rescaled: their items tell how much each of them counts."""
    batches = [data(length)[:] for length in range(1, count + 1)]
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    model, loader = accelerator.prepare(build(), DataLoader(batches, batch_size=None))
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(x), y, reduction="sum")
            accelerator.backward(loss, num_items=len(x), reduction="sum")
            if accelerator.sync_gradients:
                found = gradients(model).clone()
                model.zero_grad()
    last = batches[-(count % 4) :]
    plain = build()
    nn.functional.mse_loss(plain(torch.cat([x for x, _ in last])), torch.cat([y for _, y in last])).backward()
    torch.testing.assert_close(found, gradients(plain), atol=1e-6, rtol=0)


def test_gradients_that_a_loop_adds_up_itself() -> None:
    """Without windows, gradients of an earlier step are left as they are."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=GradientAccumulationPlugin())
    assert accelerator.gradient_accumulation_steps == 1
    model, plain = accelerator.prepare(build()), build()
    for length in (3, 5):
        x, y = data(length)[:]
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(x), y, reduction="sum")
            accelerator.backward(loss, num_items=length, reduction="sum")
        nn.functional.mse_loss(plain(x), y).backward()
    torch.testing.assert_close(gradients(model), gradients(plain), atol=1e-6, rtol=0)


def test_a_mean_is_a_sum_over_its_items() -> None:
    results = []
    for reduction in ("mean", "sum"):
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        model = accelerator.prepare(build())
        for length in (3, 5):
            x, y = data(length)[:]
            with accelerator.accumulate(model):
                accelerator.backward(
                    nn.functional.mse_loss(model(x), y, reduction=reduction), num_items=length, reduction=reduction
                )
        results.append(gradients(model))
    assert torch.allclose(*results, atol=1e-12)


def test_two_losses_in_one_micro_batch_are_weighed_alike() -> None:
    def run(split: bool) -> torch.Tensor:
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        model = accelerator.prepare(build())
        for length in (3, 5):
            x, y = data(length)[:]
            with accelerator.accumulate(model):
                for part in (slice(0, 1), slice(1, None)) if split else (slice(None),):
                    n = len(x[part])
                    accelerator.backward(
                        nn.functional.mse_loss(model(x[part]), y[part], reduction="sum"), num_items=n, reduction="sum"
                    )
        return gradients(model)

    assert torch.allclose(run(True), run(False), atol=1e-12)


def test_weighing_in_two_ways_is_refused() -> None:
    for first, second in (({}, {"num_items": 2}), ({"num_items": 2}, {})):
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        model = accelerator.prepare(build())
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(2, 4).double()).mean(), **first)
        with (
            accelerator.accumulate(model),
            pytest.raises(ConfigurationError, match="num_items"),
        ):
            accelerator.backward(model(torch.ones(2, 4).double()).mean(), **second)
    with pytest.raises(ConfigurationError, match="reduction='max'"):
        accelerator.backward(torch.ones((), requires_grad=True), num_items=1, reduction="max")  # type: ignore[arg-type]


def test_items_of_two_models_are_not_added() -> None:
    accelerator = Accelerator(cpu=True)
    models = [accelerator.prepare(build()) for _ in range(2)]

    def loss_of(model: nn.Module) -> torch.Tensor:
        return model(torch.ones(2, 4).double()).square().sum()

    with accelerator.accumulate(*models):
        accelerator.backward(loss_of(models[0]), num_items=2, reduction="sum")
        with pytest.raises(ConfigurationError, match="2 models"):
            accelerator.backward(loss_of(models[1]), num_items=2, reduction="sum")
    for model in models:
        model.zero_grad()
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model), num_items=2, reduction="sum")
        found = gradients(model)
        model.zero_grad()
        (loss_of(model) / 2).backward()
        assert torch.equal(found, gradients(model))


def sync_pattern(accelerator: Accelerator, loaders: list[Any], model: nn.Module) -> list[bool]:
    pattern = []
    for batches in zip(*loaders, strict=True):
        for _ in batches[:1]:
            with accelerator.accumulate(model):
                pattern.append(accelerator.sync_gradients)
    return pattern


def test_an_evaluation_in_the_middle_changes_nothing() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    model, train_loader, evaluation = accelerator.prepare(
        build(), DataLoader(data(32), batch_size=4), DataLoader(data(8), batch_size=4)
    )
    pattern = []
    for step, _ in enumerate(train_loader):
        with accelerator.accumulate(model):
            pattern.append(accelerator.sync_gradients)
        if step == 1:
            for _ in evaluation:
                assert accelerator.gradient_state.active_dataloader is evaluation
        if step == 4:
            next(iter(evaluation))  # abandoned
            gc.collect()
        assert accelerator.gradient_state.active_dataloader is train_loader
    assert pattern == [False, False, True, False, False, True, False, True]
    assert not accelerator.gradient_state.in_dataloader


def fetched_inside(
    batches: int, steps: int, epochs: int = 1, exhausted: bool = False
) -> tuple[str, list[torch.Tensor]]:
    """Train with batches that are fetched in the context, as rectified-flow-pytorch does."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps)
    model = build()
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(data(4 * batches), batch_size=4)
    )
    endless = (batch for _ in range(epochs) for batch in loader)
    iterators = [iter(loader) for _ in range(epochs)] if exhausted else [endless]
    pattern, weights = "", []
    for iterator in iterators:
        while True:
            with accelerator.accumulate(model):
                batch = next(iterator, None)
                if batch is None:
                    break
                pattern += str(int(accelerator.sync_gradients))
                accelerator.backward(nn.functional.mse_loss(model(batch[0]), batch[1]))
                optimizer.step()
                if accelerator.sync_gradients:
                    weights.append(torch.cat([p.detach().flatten().clone() for p in model.parameters()]))
                optimizer.zero_grad()
    return pattern, weights


def test_batches_that_are_fetched_in_the_context() -> None:
    pattern, weights = fetched_inside(6, 2)
    assert pattern == "010101"
    for actual, expected in zip(weights, reference_run(24, 4, 2, 1), strict=True):
        torch.testing.assert_close(actual, expected, atol=1e-12, rtol=0)
    # Measured with Accelerate 1.15. That an epoch ends is known in the step after the one that fetched its last batch.
    assert fetched_inside(7, 2)[0] == "0101010"
    assert fetched_inside(7, 2, epochs=3)[0] == "010101010101011010101"
    assert fetched_inside(8, 3, epochs=3)[0] == "001001001001001010010010"
    assert fetched_inside(7, 2, epochs=3, exhausted=True)[0] == "010101001010100101010"


def test_a_window_ends_with_its_loader() -> None:
    """Also if the loop over the next one fetches its batches in the context."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = accelerator.prepare(build())
    pattern = ""
    for batches in (1, 4):
        loader = accelerator.prepare_data_loader(DataLoader(data(4 * (batches + 1)), batch_size=4))
        iterator = iter(loader)
        for _ in range(batches):
            with accelerator.accumulate(model):
                next(iterator)
                pattern += str(int(accelerator.sync_gradients))
        accelerator._dataloaders.clear()
        del loader, iterator
        gc.collect()
    assert pattern == "0" + "0101"


def test_a_copy_continues_its_windows() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    model, loader = accelerator.prepare(build(), DataLoader(data(24), batch_size=4))
    pattern = []
    for step, _ in enumerate(loader):
        if step in (1, 4):
            accelerator._accumulation = copy.copy(accelerator._accumulation)
        with accelerator.accumulate(model):
            pattern.append(accelerator.sync_gradients)
    assert pattern == [False, False, True] * 2


def test_a_window_without_a_loader_continues_after_loading(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    model = accelerator.prepare(build())
    pattern = []
    for step in range(6):
        with accelerator.accumulate(model):
            pattern.append(accelerator.sync_gradients)
            accelerator.backward(model(torch.ones(1, 4).double()).sum())
        if step in (0, 4):
            accelerator.save_state(tmp_path / "state")
            accelerator.load_state(tmp_path / "state")
    assert pattern == [False, False, True] * 2


@pytest.mark.parametrize("with_loaders", [True, False])
def test_a_window_continues_where_the_batches_before_it_are_skipped(tmp_path: Path, with_loaders: bool) -> None:
    """It is that of a loaded state, or it began with the loader without its first batches and spans two loops."""
    plugin = GradientAccumulationPlugin(num_steps=3, sync_with_dataloader=with_loaders)

    def run(interrupted: bool, first: int) -> torch.Tensor:
        with context.isolated():
            accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
            model = build()
            model, optimizer, loader = accelerator.prepare(
                model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(data(24), batch_size=4)
            )

            def train(batches: Any, stop: int = 9) -> None:
                for step, (x, y) in enumerate(batches):
                    with accelerator.accumulate(model):
                        accelerator.backward(nn.functional.mse_loss(model(x), y))
                        optimizer.step()
                        optimizer.zero_grad()
                    if step == stop:
                        accelerator.save_state(tmp_path / "state")

            if interrupted:
                accelerator.load_state(tmp_path / "state")
                train(accelerator.skip_first_batches(loader, 4))
            elif first:
                train(accelerator.skip_first_batches(loader, first))
            else:
                train(loader, stop=3)
            train(loader)
            return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])

    if with_loaders:
        whole = run(interrupted=False, first=0)
        torch.testing.assert_close(run(interrupted=True, first=0), whole, atol=1e-12, rtol=0)
    else:
        model, samples = build(), data(24)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        order = [8, 12, 16, 20, 0, 4, 8, 12, 16, 20]  # the last window is open
        for start in range(0, 9, 3):
            optimizer.zero_grad()
            for index in order[start : start + 3]:
                x, y = samples[index : index + 4]
                (nn.functional.mse_loss(model(x), y) / 3).backward()
            optimizer.step()
        expected = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
        torch.testing.assert_close(run(interrupted=False, first=2), expected, atol=1e-12, rtol=0)


def test_the_running_count_of_micro_batches() -> None:
    """As Accelerate counts; k-diffusion computes with it."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    model, loader = accelerator.prepare(build(), DataLoader(data(28), batch_size=4))
    counts = [accelerator.step]
    for _ in range(2):
        for _ in loader:
            with accelerator.accumulate(model):
                counts.append(accelerator.step)
    assert counts == [0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 3, 4, 5, 6, 0] and accelerator.step == 0
    accelerator = Accelerator(cpu=True)
    accelerator.step = 4
    with accelerator.accumulate(model):
        assert accelerator.step == 5


def test_a_window_without_a_loader_stays_apart_from_a_loop_that_begins_later() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    model, loader = accelerator.prepare(build(), DataLoader(data(12), batch_size=4))
    with accelerator.accumulate(model):
        assert not accelerator.sync_gradients
    pattern = []
    for _ in loader:
        with accelerator.accumulate(model):
            pattern.append(accelerator.sync_gradients)
    assert pattern == [False, False, True]


def test_interleaved_loaders_and_models_have_windows_of_their_own() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    first, second, a, b = accelerator.prepare(
        build(0), build(1), DataLoader(data(16), batch_size=4), DataLoader(data(12), batch_size=4)
    )
    patterns: dict[str, list[bool]] = {"a": [], "b": [], "c": []}
    iterator_b = iter(b)
    for _ in a:
        with accelerator.accumulate(first):
            patterns["a"].append(accelerator.sync_gradients)
        with accelerator.accumulate(second):
            patterns["c"].append(accelerator.sync_gradients)
        if next(iterator_b, None) is not None:
            with accelerator.accumulate(second):
                patterns["b"].append(accelerator.sync_gradients)
    assert patterns == {"a": [False, True] * 2, "c": [False, True] * 2, "b": [False, True, True]}


def test_windows_may_span_loaders_where_asked() -> None:
    plugin = GradientAccumulationPlugin(num_steps=4, sync_with_dataloader=False)
    accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
    model, loader = accelerator.prepare(build(), DataLoader(data(12), batch_size=4))
    pattern = [
        accelerator.sync_gradients
        for _ in range(2)
        for _ in loader
        for _ in [accelerator.accumulate(model).__enter__()]
    ]
    assert pattern == [False, False, False, True, False, False]


@pytest.mark.parametrize(
    ("spans_loaders", "leave_after"), [(False, 3), (True, 3), (True, None)], ids=["left", "left, spans", "ended, spans"]
)
def test_the_loader_of_the_next_epoch_continues_a_window(spans_loaders: bool, leave_after: int | None) -> None:
    plugin = GradientAccumulationPlugin(num_steps=2, sync_with_dataloader=not spans_loaders)
    accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
    model, reference, samples = build(), build(), data(20)
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(4):
        loader = accelerator.prepare(DataLoader(samples, batch_size=4))
        for number, (x, y) in enumerate(loader, start=1):
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.mse_loss(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
            if number == leave_after:
                break
    batches = [samples[first : first + 4] for first in range(0, 4 * (leave_after or 5), 4)] * 4
    for first in range(0, len(batches), 2):
        plain.zero_grad()
        for x, y in batches[first : first + 2]:
            (nn.functional.mse_loss(reference(x), y) / 2).backward()
        plain.step()
    for weights, expected in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(weights, expected, atol=1e-12, rtol=0)


def test_the_launchers_number_of_steps_wins_with_a_warning(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("accel_state.logging._already_warned", set())
    with patch_environment(ACCELERATE_GRADIENT_ACCUMULATION_STEPS="4"):
        for unchosen in ({}, {"gradient_accumulation_steps": 1}, {"gradient_accumulation_steps": 4}):
            assert Accelerator(cpu=True, **unchosen).gradient_accumulation_steps == 4
        assert "overridden" not in caplog.text
        assert Accelerator(cpu=True, gradient_accumulation_steps=2).gradient_accumulation_steps == 4
        assert "gradient_accumulation_steps=2 is overridden by the launcher's 4" in caplog.text
        plugin = GradientAccumulationPlugin(num_steps=3)
        assert Accelerator(cpu=True, gradient_accumulation_plugin=plugin).gradient_accumulation_steps == 4
        assert "gradient_accumulation_steps=3 is overridden by the launcher's 4" in caplog.text
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    accelerator.gradient_accumulation_steps = 5
    assert accelerator.gradient_accumulation_steps == 5 and accelerator.gradient_state.num_steps == 5
    with pytest.raises(ConfigurationError, match="num_steps=0"):
        accelerator.gradient_accumulation_steps = 0
    with pytest.raises(ConfigurationError, match="both given"):
        Accelerator(cpu=True, gradient_accumulation_steps=2, gradient_accumulation_plugin=GradientAccumulationPlugin())


def count_all_reduces(mode: str) -> int:
    """Gradient buckets reduced in one window of four micro batches, counted by a communication hook."""
    plugin = GradientAccumulationPlugin(num_steps=4, sync_each_batch=mode == "each")
    accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
    model = accelerator.prepare(build())
    reduced = []

    def hook(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        reduced.append(bucket.index())
        return allreduce_hook(None, bucket)  # type: ignore[arg-type]

    # DDP looks at the annotations, which are text in this module.
    hook.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[torch.Tensor]}

    model.register_comm_hook(None, hook)
    x, y = data(4)[:]
    for step in range(4):
        if mode == "no_sync":
            with accelerator.no_sync(model) if step < 3 else torch.enable_grad():
                accelerator.backward(nn.functional.mse_loss(model(x), y))
        elif mode == "trigger":
            with accelerator.no_sync(model):
                loss = nn.functional.mse_loss(model(x + accelerator.process_index), y)
            if step < 3:
                with accelerator.no_sync(model):
                    accelerator.backward(loss)
            else:
                with accelerator.trigger_sync_in_backward(model):
                    accelerator.backward(loss)
        else:
            with accelerator.accumulate(*([] if mode == "unnamed" else [model])):
                accelerator.backward(nn.functional.mse_loss(model(x), y))
    everyone = accelerator.gather(gradients(model)[None])
    assert torch.allclose(everyone[0], everyone[1]), "the ranks' gradients differ after synchronisation"
    return len(reduced)


def count_in_all_modes() -> dict[str, int]:
    return {mode: count_all_reduces(mode) for mode in ("accumulate", "unnamed", "no_sync", "trigger", "each")}


def test_gradients_travel_once_a_window() -> None:
    expected = {"accumulate": 1, "unnamed": 1, "no_sync": 1, "trigger": 1, "each": 4}
    assert run_world(count_in_all_modes, 2) == [expected] * 2


def uneven_settings() -> float:
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(even_batches=False))
    model = build()
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(data(12), batch_size=4)
    )
    steps = 0
    with accelerator.join_uneven_inputs([model]):
        for x, y in loader:
            optimizer.zero_grad()
            accelerator.backward(nn.functional.mse_loss(model(x), y))
            optimizer.step()
            steps += 1
    accelerator.wait_for_everyone()
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    everyone = accelerator.gather(weights[None])
    assert torch.equal(everyone[0], everyone[1])
    return steps


def test_ranks_may_run_out_of_data_at_different_times() -> None:
    assert run_world(uneven_settings, 2) == [2, 1]

"""Several loaders read side by side, nested, or left open: windows and gathers follow the loader of the data."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from accel import Accelerator
from accel_data import skip_first_batches
from accel_state import GradientAccumulationPlugin
from accel_state.errors import ConfigurationError
from accel_state.testing import run_world

Pairs = Iterator[tuple[torch.Tensor, torch.Tensor]]


def forever(loader: Any) -> Iterator[torch.Tensor]:
    while True:
        yield from loader


def by_hand(first: Any, second: Any) -> Pairs:
    """A loop of semi-supervised training: the iterator of the second loader outlives the epoch."""
    others = iter(second)
    for _ in range(2):
        for x in first:
            try:
                y = next(others)
            except StopIteration:
                others = iter(second)
                y = next(others)
            yield x, y


LOOPS: dict[str, Callable[[Any, Any], Pairs]] = {
    "zip": zip,
    "cycled": lambda first, second: zip(first, forever(second), strict=False),
    "itertools.cycle": lambda first, second: zip(first, itertools.cycle(second), strict=False),
    "by hand": by_hand,
}


def batches(rows: int, size: int, scale: float = 1.0) -> DataLoader[Any]:
    return DataLoader(torch.arange(1.0, rows + 1).unsqueeze(1) * scale, batch_size=size)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(1, 3), nn.Tanh(), nn.Linear(3, 1))


def loss_of(network: nn.Module, *parts: torch.Tensor) -> torch.Tensor:
    return sum((network(part).square().mean() for part in parts), torch.zeros(()))


def weights(network: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in network.parameters()])


def sgd(network: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(network.parameters(), lr=0.1)


def plain(windows: list[list[tuple[torch.Tensor, ...]]], network: nn.Module | None = None) -> torch.Tensor:
    """The weights after a step for each window of micro batches."""
    network = model() if network is None else network
    optimizer = sgd(network)
    for window in windows:
        optimizer.zero_grad()
        for parts in window:
            (loss_of(network, *parts) / len(window)).backward()
        optimizer.step()
    return weights(network)


def windows_of(steps: list[Any], size: int) -> list[list[Any]]:
    return [steps[i : i + size] for i in range(0, len(steps), size)]


class Run:
    """A model that is trained with accumulation."""

    def __init__(self, steps: int, *loaders: DataLoader[Any], sync_with_dataloader: bool = True) -> None:
        plugin = GradientAccumulationPlugin(num_steps=steps, sync_with_dataloader=sync_with_dataloader)
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
        network = model()
        self.model, self.optimizer, *self.loaders = self.accelerator.prepare(network, sgd(network), *loaders)

    def step(self, *parts: torch.Tensor, loader: Any = None) -> None:
        with self.accelerator.accumulate(self.model, loader=loader):
            self.accelerator.backward(loss_of(self.model, *parts))
            self.optimizer.step()
            self.optimizer.zero_grad()

    def check(self, windows: list[list[tuple[torch.Tensor, ...]]]) -> None:
        torch.testing.assert_close(weights(self.model), plain(windows))


@pytest.fixture(autouse=True)
def _warns_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accel_state.logging._already_warned", set())


@pytest.mark.parametrize("rows", [5, 13])  # of the second loader: 3 or 7 batches
@pytest.mark.parametrize("steps", [2, 3])
@pytest.mark.parametrize("loop", ["cycled", "itertools.cycle", "by hand"])
def test_windows_of_two_loaders_end_with_the_one_that_ends_the_loop(loop: str, steps: int, rows: int) -> None:
    first, second = batches(22, 2), batches(rows, 2, -0.5)  # 11 batches, 22 in two epochs
    run = Run(steps, first, second)
    for x, y in LOOPS[loop](*run.loaders):
        run.step(x, y)
    found = list(LOOPS[loop](first, second))
    run.check([window for i in range(0, len(found), 11) for window in windows_of(found[i : i + 11], steps)])


@pytest.mark.parametrize("second_rows", [22, 40])
def test_windows_of_zip_end_with_the_first_loader(second_rows: int) -> None:
    first, second = batches(22, 2), batches(second_rows, 2, -0.5)
    run = Run(4, first, second)
    for _ in range(2):
        for x, y in zip(*run.loaders, strict=False):
            run.step(x, y)
    run.check(windows_of(list(zip(first, second, strict=False)), 4) * 2)


def test_windows_of_zip_end_with_the_loader_that_is_named(caplog: pytest.LogCaptureFixture) -> None:
    long, short = batches(22, 2), batches(6, 2, -0.5)
    expected = windows_of(list(zip(short, long, strict=False)), 2)
    for named, warned in ((1, 0), (None, 1)):
        run = Run(2, long, short)
        with caplog.at_level(logging.WARNING):
            for x, y in zip(*run.loaders, strict=False):
                run.step(y, x, loader=None if named is None else run.loaders[named])
        assert len([r for r in caplog.records if "accumulate(model, loader=loader)" in r.message]) == warned
        run.check(expected if named else expected[:1])
    cycled = list(zip(itertools.cycle(list(short)), long, strict=False))
    run = Run(2, long, short)
    for y, x in zip(forever(run.loaders[1]), run.loaders[0], strict=False):
        run.step(y, x, loader=run.loaders[0])
    run.check(windows_of(cycled, 2))


def test_a_named_loader_may_be_skipped_in_closed_or_fetched_in_the_block() -> None:
    first, second = batches(14, 2), batches(6, 2, -0.5)
    run = Run(2, first, second)
    skipped, other = run.loaders
    for x, y in zip(skip_first_batches(skipped, 2), forever(other), strict=False):
        run.step(x, y, loader=skipped)
    pairs = list(zip(list(first)[2:], itertools.cycle(list(second)), strict=False))
    run.check(windows_of(pairs, 2))
    with pytest.raises(ConfigurationError, match="prepare\\(\\) did not return"):
        run.accelerator.accumulate(run.model, loader=first).__enter__()


def test_a_named_loader_that_has_ended_ends_no_window() -> None:
    first, second = batches(8, 2), batches(6, 2)
    run = Run(2, first, second)
    assert len(list(run.loaders[1])) == 3 and run.loaders[1].end_of_dataloader
    for x in run.loaders[0]:
        run.step(x, loader=run.loaders[1])
    run.check(windows_of([(x,) for x in first], 2))


def test_a_named_loader_keeps_its_windows_between_its_iterations() -> None:
    real, others, noise = batches(6, 2), batches(6, 2, 2.0), batches(4, 2, -0.5)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    critic, generator = model(), model()
    critic, generator, *rest = accelerator.prepare(critic, generator, sgd(critic), sgd(generator), real, others, noise)
    of_critic, of_generator, first, second, third = rest
    for x in itertools.chain(first, second):
        for network, optimizer, loader in ((critic, of_critic, None), (generator, of_generator, third)):
            with accelerator.accumulate(network, loader=loader):
                # No iteration of the third loader is open where a block begins.
                accelerator.backward(loss_of(network, x if loader is None else next(iter(loader))))
                optimizer.step()
                optimizer.zero_grad()
    expected = [window for loader in (real, others) for window in windows_of([(x,) for x in loader], 2)]
    torch.testing.assert_close(weights(critic), plain(expected))
    torch.testing.assert_close(weights(generator), plain(windows_of([(next(iter(noise)),)] * 6, 2)))


@pytest.mark.parametrize("named", ["-0-1-0", "--1--1", "01-10-"])
def test_a_window_continues_when_another_loader_is_named(named: str) -> None:
    first, second = batches(14, 2), batches(14, 2, -0.5)  # 7 batches each
    run = Run(3, first, second)
    for (x, y), name in zip(zip(*run.loaders, strict=False), named, strict=False):
        run.step(x, y, loader=None if name == "-" else run.loaders[int(name)])
    run.check(windows_of(list(zip(first, second, strict=False))[:6], 3))


@pytest.mark.parametrize("named", [None, 0, 1])
def test_windows_of_two_loaders_may_go_on_after_their_end(named: int | None) -> None:
    first, second = batches(6, 2), batches(6, 2, -0.5)  # 3 batches each
    run = Run(2, first, second, sync_with_dataloader=False)
    for _ in range(2):
        for x, y in zip(*run.loaders, strict=True):
            run.step(x, y, loader=None if named is None else run.loaders[named])
    run.check(windows_of(list(zip(first, second, strict=True)) * 2, 2))


def test_a_window_without_a_loader_stays_open_during_the_loop_of_another_model() -> None:
    rows = batches(8, 2)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    critic, generator = model(), model()
    critic, generator, *rest, loader = accelerator.prepare(critic, generator, sgd(critic), sgd(generator), rows)
    noise = -torch.ones(2, 1)

    def step(network: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
        with accelerator.accumulate(network):
            accelerator.backward(loss_of(network, batch))
            optimizer.step()
            optimizer.zero_grad()

    step(generator, rest[1], noise)
    for x in loader:
        step(critic, rest[0], x)
    step(generator, rest[1], noise / 2)
    torch.testing.assert_close(weights(critic), plain(windows_of([(x,) for x in rows], 2)))
    torch.testing.assert_close(weights(generator), plain([[(noise,), (noise / 2,)]]))


def test_a_window_that_begins_anew_has_no_gradients_to_miss(caplog: pytest.LogCaptureFixture) -> None:
    first = batches(10, 2)
    run = Run(3, first)
    with caplog.at_level(logging.WARNING):
        for number, x in enumerate(run.loaders[0]):
            if number == 2:
                run.accelerator.step = 0
                run.model.zero_grad()
            run.step(x)
    assert not caplog.records
    run.check([[(x,) for x in first][2:]])


@pytest.mark.parametrize("rows", [(14, 8), (10, 10)])  # one ends with a full window, or both with a short one
def test_loaders_that_end_where_a_window_does_need_no_name(
    rows: tuple[int, int], caplog: pytest.LogCaptureFixture
) -> None:
    first, second = batches(rows[0], 2), batches(rows[1], 2, -0.5)
    run = Run(2, first, second)
    with caplog.at_level(logging.WARNING):
        for x, y in zip(*run.loaders, strict=False):
            run.step(x, y)
    assert not caplog.records
    run.check(windows_of(list(zip(first, second, strict=False)), 2))


@pytest.mark.parametrize("used_first", [True, False])
@pytest.mark.parametrize("rows", [2, 7])  # one batch, or several
def test_an_evaluation_within_a_step_changes_no_window(rows: int, used_first: bool) -> None:
    train = batches(14, 2)
    run = Run(3, train, batches(rows, 2))
    for x in run.loaders[0]:
        if used_first:
            run.step(x)
        for y in run.loaders[1]:
            run.accelerator.gather_for_metrics(y)
        if not used_first:
            run.step(x)
    run.check(windows_of([(x,) for x in train], 3))


@pytest.mark.parametrize("taken", [1, 2, 3])
def test_an_iterator_that_is_left_open_changes_no_window(taken: int) -> None:
    train = batches(14, 2)
    run = Run(3, train, batches(6, 2))
    left_open = iter(run.loaders[1])
    shown = list(itertools.islice(left_open, taken))
    for x in run.loaders[0]:
        run.step(x)
    run.check(windows_of([(x,) for x in train], 3))
    assert len(shown) == taken and left_open is not None


def test_windows_of_an_inner_loop_are_its_loaders() -> None:
    tasks, examples = batches(4, 2), batches(10, 2, -0.5)
    run = Run(3, tasks, examples)
    for task in run.loaders[0]:
        for x in run.loaders[1]:
            run.step(task, x)
    inner = [[(task, x) for x in examples] for task in tasks]
    run.check([window for steps in inner for window in windows_of(steps, 3)])


def test_batches_of_two_loaders_that_are_fetched_in_the_block() -> None:
    first, second = batches(24, 2), batches(5, 2, -0.5)
    run = Run(2, first, second)
    mine, others = iter(run.loaders[0]), forever(run.loaders[1])
    for _ in range(12):
        with run.accelerator.accumulate(run.model):
            run.accelerator.backward(loss_of(run.model, next(mine), next(others)))
            run.optimizer.step()
            run.optimizer.zero_grad()
    run.check(windows_of(list(zip(first, itertools.cycle(list(second)), strict=False)), 2))


def test_a_block_uses_its_batches() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    network, first, second = accelerator.prepare(model(), batches(8, 2), batches(20, 2))
    state, inside, outside = accelerator.gradient_state, iter(second), iter(first)
    for _ in range(4):
        next(outside)
        with accelerator.accumulate(network):
            assert state.batch_used
            next(inside)
        assert state.batch_used
    for use in (lambda x: accelerator.backward(loss_of(network, x)), accelerator.gather_for_metrics):
        use(next(inside))
        assert state.batch_used
    accelerator._do_sync()
    assert next(inside) is not None and state.step_dataloaders == [second]


def test_models_that_alternate_have_the_windows_of_their_loaders() -> None:
    real, noise = batches(14, 2), batches(10, 2, -0.5)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    critic, generator = model(), model()
    critic, generator, *rest = accelerator.prepare(critic, generator, sgd(critic), sgd(generator), real, noise)
    of_critic, of_generator, first, second = rest
    others = forever(second)
    for x in first:
        for network, optimizer, batch in ((critic, of_critic, x), (generator, of_generator, None)):
            batch = next(others) if batch is None else batch
            with accelerator.accumulate(network):
                accelerator.backward(loss_of(network, batch))
                optimizer.step()
                optimizer.zero_grad()
    torch.testing.assert_close(weights(critic), plain(windows_of([(x,) for x in real], 3)))
    # 5 batches, and 2 of the next epoch, whose window is open.
    torch.testing.assert_close(weights(generator), plain(windows_of([(x,) for x in noise], 3)))


def gathered(loop: str, rows: tuple[int, int], dispatch: bool) -> dict[str, Any]:
    """What is gathered of two loaders, in the ways that name the loader or let it be found."""
    accelerator = Accelerator(cpu=True)
    if dispatch:
        accelerator.dataloader_config.dispatch_batches = True
    first, second = accelerator.prepare(batches(rows[0], 2), batches(rows[1], 2, -1.0))
    found: dict[str, list[float]] = {name: [] for name in ("first", "labels", "second", "named", "named first")}
    for x, y in LOOPS[loop](first, second):
        found["first"] += accelerator.gather_for_metrics(2 * x).flatten().tolist()
        found["labels"] += accelerator.gather_for_metrics((2 * y, y[:, 0]))[0].flatten().tolist()
        found["second"] += (
            accelerator.gather_for_metrics({"values": y}, use_gather_object=False)["values"].flatten().tolist()
        )
        found["named"] += accelerator.gather_for_metrics(2 * y, loader=second).flatten().tolist()
        found["named first"] += accelerator.gather_for_metrics([float(v) for v in x], True, loader=first)
    return found


def check_gathers() -> None:
    world = Accelerator(cpu=True).num_processes
    rows_of = {"zip": (22, 26), "cycled": (26, 6), "by hand": (26, 22)}
    for (loop, rows), dispatch in itertools.product(rows_of.items(), (False, True)):
        found = gathered(loop, rows, dispatch)
        samples = [batches(rows[0], 2 * world), batches(rows[1], 2 * world, -1.0)]
        steps = list(LOOPS[loop](*samples))
        one = [value for x, _ in steps for value in x.flatten().tolist()]
        two = [value for _, y in steps for value in y.flatten().tolist()]
        label = (loop, rows, dispatch)
        assert found["first"] == [2 * value for value in one], label
        assert found["named first"] == one, label
        assert found["second"] == two, label
        assert found["labels"] == found["named"] == [2 * value for value in two], label


def check_other_loops() -> None:
    """Loops in which one of two open loaders is clearly the current one."""
    accelerator = Accelerator(cpu=True)
    world = accelerator.num_processes
    train, one_batch, other, fixed = accelerator.prepare(
        batches(7, 2), batches(2 * world - 1, 2, -1.0), batches(9, 2, -1.0), batches(9, 2)
    )
    network = accelerator.prepare(model())
    seen: dict[str, list[float]] = {"train": [], "before": [], "after": []}
    left_open = iter(fixed)
    next(left_open)
    for x in train:
        for y in one_batch:
            seen["before"] += accelerator.gather_for_metrics(-y).flatten().tolist()
        accelerator.backward(loss_of(network, x))
        for loader in (one_batch, other):
            for y in loader:
                seen["after"] += accelerator.gather_for_metrics(-y).flatten().tolist()
        seen["train"] += accelerator.gather_for_metrics(2 * x).flatten().tolist()
    steps = -(-7 // (2 * world))
    assert seen["train"] == [2.0 * (i + 1) for i in range(7)]
    assert seen["before"] == [i + 1.0 for i in range(2 * world - 1)] * steps
    assert seen["after"] == ([i + 1.0 for i in range(2 * world - 1)] + [i + 1.0 for i in range(9)]) * steps


def check_all_gathers() -> None:
    check_gathers()
    check_other_loops()


def test_gathers_of_two_loaders_on_one_process() -> None:
    check_all_gathers()


def test_gathers_of_two_loaders() -> None:
    run_world(check_all_gathers, 2)


def test_a_gather_that_may_be_of_either_loader_warns(caplog: pytest.LogCaptureFixture) -> None:
    accelerator = Accelerator(cpu=True)
    first, second = accelerator.prepare(batches(8, 4), batches(7, 4))
    with caplog.at_level(logging.WARNING):
        for x, y in zip(first, second, strict=True):
            values = accelerator.gather_for_metrics(torch.arange(4.0))  # of the first, which has no padding
            assert len(values) == 4
            assert len(accelerator.gather_for_metrics(torch.arange(4.0), loader=second)) == len(y)
            if len(x) == len(y):
                assert len(accelerator.gather_for_metrics((x, y))[1]) == 4
            else:
                with pytest.raises(ConfigurationError, match="once for the values of each loader"):
                    accelerator.gather_for_metrics((x, y))
    assert [record.message.count("loader=loader") for record in caplog.records] == [1]
    with pytest.raises(ConfigurationError, match="not being iterated"):
        accelerator.gather_for_metrics(x, loader=second)
    with pytest.raises(ConfigurationError, match="prepare\\(\\) did not return"):
        accelerator.gather_for_metrics(x, loader=batches(7, 4))


def test_a_gather_in_a_nested_loop_does_not_warn(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        check_other_loops()
    assert not caplog.records


def test_a_tensor_of_several_batches_does_not_tell_the_loader_of_a_gather(caplog: pytest.LogCaptureFixture) -> None:
    shared = torch.arange(4.0)

    def with_shared(rows: int) -> DataLoader[Any]:
        return DataLoader(torch.arange(rows), batch_size=4, collate_fn=lambda samples: (torch.stack(samples), shared))

    accelerator = Accelerator(cpu=True)
    with caplog.at_level(logging.WARNING):
        for (x, same), (y, _) in zip(*accelerator.prepare(with_shared(8), with_shared(7)), strict=True):
            assert same is shared
            for rows in (x, y):
                kept, gathered_rows = accelerator.gather_for_metrics((shared, rows))
                assert kept.tolist() == shared[: len(rows)].tolist() and gathered_rows.tolist() == rows.tolist()
        assert not caplog.records
        for (_, same), _ in zip(*accelerator.prepare(with_shared(8), with_shared(7)), strict=True):
            assert len(accelerator.gather_for_metrics(same)) == 4  # of the first, which has no padding
    assert [record.message.count("loader=loader") for record in caplog.records] == [1]

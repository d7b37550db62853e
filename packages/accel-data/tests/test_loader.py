"""Prepared loaders in one process: the batches of torch, the last one marked, and every setting kept."""

from __future__ import annotations

import gc
import weakref
from collections import namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, SequentialSampler

from accel_data import DataLoaderShard, SkipDataLoader, get_sampler, prepare_data_loader, skip_first_batches
from accel_state.errors import ConfigurationError
from accel_state.state import GradientState

Pair = namedtuple("Pair", "left right")


class Numbers(Dataset):
    def __init__(self, length: int) -> None:
        self.length = length
        self.reads: list[int] = []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        self.reads.append(index)
        return torch.tensor(index)


class Stream(IterableDataset):
    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Any:
        return iter(torch.arange(self.length))


class Everything(Dataset):
    """Samples of every kind that a collate function of torch takes."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {
            "tensor": torch.full((2,), index),
            "array": np.full(3, index),
            "text": f"sample {index}",
            "pair": Pair(torch.tensor(index), float(index)),
            "nested": [{"deep": index}, (index, str(index))],
        }


def lists(loader: Any) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


def same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor | np.ndarray):
        return left.dtype == right.dtype and left.tolist() == right.tolist()
    if isinstance(left, dict):
        return (
            type(left) is type(right)
            and left.keys() == right.keys()
            and all(same(left[key], right[key]) for key in left)
        )
    if isinstance(left, list | tuple):
        return type(left) is type(right) and len(left) == len(right) and all(map(same, left, right))
    return left == right


def label(batch: list[int]) -> str:
    return "+".join(map(str, map(int, batch)))


@pytest.mark.parametrize(
    "build",
    [
        lambda: DataLoader(Numbers(10), batch_size=3),
        lambda: DataLoader(Numbers(10), batch_size=3, drop_last=True),
        lambda: DataLoader(Numbers(10), batch_size=3, shuffle=True),
        lambda: DataLoader(Numbers(10), batch_size=3, shuffle=True, num_workers=2),
        lambda: DataLoader(Numbers(10), batch_size=3, num_workers=2, persistent_workers=True, prefetch_factor=3),
        lambda: DataLoader(Numbers(10), batch_sampler=BatchSampler(SequentialSampler(range(10)), 4, False)),
        lambda: DataLoader(Numbers(10), batch_sampler=[[1, 2, 3], [4], [5, 6]]),
        lambda: DataLoader(Numbers(10), sampler=[4, 3, 2], batch_size=2),
        lambda: DataLoader(Numbers(10), sampler=RandomSampler(range(10), num_samples=25), batch_size=4),
        lambda: DataLoader(Numbers(10), batch_size=None),
        lambda: DataLoader(Numbers(10), batch_size=None, shuffle=True),
        lambda: DataLoader(Numbers(10), batch_size=4, collate_fn=label),
        lambda: DataLoader(Everything(), batch_size=2),
        lambda: DataLoader(Stream(10), batch_size=3),
        lambda: DataLoader(Stream(10), batch_size=3, drop_last=True),
        lambda: DataLoader(Stream(10), batch_size=None),
        lambda: DataLoader(Stream(10), batch_size=3, num_workers=2),
        lambda: DataLoader(Stream(0), batch_size=3),
        lambda: DataLoader(Numbers(0), batch_size=3),
    ],
)
@pytest.mark.parametrize("dispatch", [None, True])
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_the_batches_of_one_process_are_those_of_torch(build: Any, dispatch: bool | None) -> None:
    torch.manual_seed(1)
    expected = list(build())
    torch.manual_seed(1)
    loader = prepare_data_loader(build(), put_on_device=True, dispatch_batches=dispatch)
    ends, batches = [], []
    for batch in loader:
        batches.append(batch)
        ends.append(loader.end_of_dataloader)
    assert same(batches, expected)
    assert ends == [False] * (len(ends) - 1) + [True] * bool(ends)
    assert not loader.ragged


def test_a_seedable_order_depends_on_seed_and_epoch_only() -> None:
    plain = DataLoader(Numbers(20), batch_size=4, shuffle=True)
    loader = prepare_data_loader(plain, use_seedable_sampler=True, data_seed=42)
    epochs = [lists(loader) for _ in range(3)]
    assert epochs[0] != epochs[1] != epochs[2]
    torch.manual_seed(77)
    other = prepare_data_loader(plain, use_seedable_sampler=True, data_seed=42)
    other.set_epoch(2)
    assert lists(other) == epochs[2]
    assert other.iteration == 3
    assert type(plain.sampler) is RandomSampler, "the given loader was changed"


def test_epochs_count_up_by_themselves_also_when_one_is_abandoned() -> None:
    loader = prepare_data_loader(
        DataLoader(Numbers(8), batch_size=2, shuffle=True), use_seedable_sampler=True, data_seed=1
    )
    expected = [lists(loader) for _ in range(3)]
    loader.set_epoch(0)
    for _ in loader:
        assert loader.iteration == 0
        break
    assert loader.iteration == 1
    assert lists(loader) == expected[1]


class Epochs:
    """A sampler that wants to know the epoch."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.seen.append(epoch)

    def __iter__(self) -> Any:
        return iter(range(4))

    def __len__(self) -> int:
        return 4


def test_samplers_and_data_sets_are_told_the_epoch() -> None:
    sampler, data = Epochs(), Numbers(4)
    data.set_epoch = sampler.seen.append
    loader = prepare_data_loader(DataLoader(data, sampler=sampler))
    lists(loader), lists(loader)
    assert sampler.seen == [0, 0, 1, 1]
    assert get_sampler(loader) is sampler is loader.sampler


def test_the_gradient_state_follows_nested_and_interleaved_loops() -> None:
    gradient_state = GradientState()
    outer = prepare_data_loader(DataLoader(Numbers(5), batch_size=2))
    inner = prepare_data_loader(DataLoader(Numbers(3), batch_size=2))
    seen = []
    for _ in outer:
        seen.append(
            (gradient_state.active_dataloader is outer, gradient_state.end_of_dataloader, gradient_state.remainder)
        )
        for _ in inner:
            assert gradient_state.active_dataloader is inner
            assert gradient_state.remainder == 1
        assert gradient_state.active_dataloader is outer
        assert gradient_state.end_of_dataloader == seen[-1][1]
    assert seen == [(True, False, 1), (True, False, 1), (True, True, 1)]
    assert not gradient_state.in_dataloader
    for left, right in zip(outer, inner, strict=False):
        assert gradient_state.active_dataloader is inner
        assert len(left) >= len(right)
    gc.collect()
    assert not gradient_state.in_dataloader


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("dispatch", [False, True])
def test_an_abandoned_loader_is_freed(workers: int, dispatch: bool) -> None:
    gradient_state = GradientState()
    loader = prepare_data_loader(DataLoader(Numbers(10), batch_size=2, num_workers=workers), dispatch_batches=dispatch)
    for _ in loader:
        assert gradient_state.in_dataloader
        break
    assert not gradient_state.in_dataloader
    iterator = iter(loader)
    next(iterator)
    alive = weakref.ref(loader)
    del loader, iterator
    # No collection: nothing may hold a prepared loader in a cycle, or its workers would live on.
    assert alive() is None
    assert not gradient_state.in_dataloader


def test_two_loops_over_one_loader_do_not_end_each_other() -> None:
    gradient_state = GradientState()
    loader = prepare_data_loader(DataLoader(Numbers(6), batch_size=2))
    first, second = iter(loader), iter(loader)
    next(first), next(second)
    del first
    assert gradient_state.active_dataloader is loader
    assert [batch.tolist() for batch in second] == [[2, 3], [4, 5]]


def note_worker(worker: int) -> None:
    """A worker_init_fn."""


def first_of(samples: list[Any]) -> Any:
    return torch.stack(samples)


SETTINGS = [
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "generator",
    "prefetch_factor",
    "persistent_workers",
]


@pytest.mark.parametrize("iterable", [False, True])
def test_preparing_and_skipping_keep_every_setting(iterable: bool) -> None:
    plain = DataLoader(
        Stream(9) if iterable else Numbers(9),
        batch_size=2,
        num_workers=1,
        collate_fn=first_of,
        pin_memory=True,
        timeout=30,
        worker_init_fn=note_worker,
        multiprocessing_context="fork",
        generator=torch.Generator(),
        prefetch_factor=3,
        persistent_workers=True,
        **({"in_order": False} if hasattr(DataLoader(range(1)), "in_order") else {}),
    )
    prepared = prepare_data_loader(plain)
    for loader in (
        prepared,
        skip_first_batches(prepared, 1),
        skip_first_batches(plain, 1),
        prepare_data_loader(plain, dispatch_batches=True),
    ):
        names = [*SETTINGS, "multiprocessing_context", *(["in_order"] if hasattr(plain, "in_order") else [])]
        assert {name: getattr(loader, name) for name in names} == {name: getattr(plain, name) for name in names}


@pytest.mark.parametrize("prepared", [False, True])
def test_a_skip_reads_nothing_and_lasts_one_epoch(prepared: bool) -> None:
    data = Numbers(10)
    loader: Any = DataLoader(data, batch_size=3)
    if prepared:
        loader = prepare_data_loader(loader)
    skipped = skip_first_batches(loader, 2)
    assert isinstance(skipped, DataLoader)
    assert len(skipped) == 2
    assert lists(skipped) == [[6, 7, 8], [9]]
    assert data.reads == [6, 7, 8, 9]
    assert len(skipped) == 4
    assert lists(skipped) == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]
    assert lists(loader) == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]


def test_a_skip_is_the_rest_of_the_epoch_that_would_have_come() -> None:
    def build() -> Any:
        generator = torch.Generator().manual_seed(4)
        return prepare_data_loader(DataLoader(Numbers(10), batch_size=3, shuffle=True, generator=generator))

    loader, other = build(), build()
    first, second = lists(loader), lists(loader)
    assert lists(skip_first_batches(other, 2)) == first[2:]
    assert lists(other) == second
    assert lists(skip_first_batches(build(), 100)) == []


def test_a_skip_is_a_number_of_batches() -> None:
    plain = DataLoader(range(4), batch_size=2)
    for count in (0, 0.0):
        assert lists(skip_first_batches(plain, count)) == [[0, 1], [2, 3]]
    assert lists(skip_first_batches(plain, 1.0)) == [[2, 3]]
    for wrong in (1.5, "1", None):
        with pytest.raises(ConfigurationError, match=f"num_batches={wrong!r} must be an integer"):
            skip_first_batches(plain, wrong)
    with pytest.raises(TypeError, match="skip_first_batches.*Pass a DataLoader"):
        skip_first_batches([[0, 1], [2, 3]], 1)


def test_a_skip_of_iterable_data() -> None:
    for loader in (DataLoader(Stream(10), batch_size=3), prepare_data_loader(DataLoader(Stream(10), batch_size=3))):
        skipped = skip_first_batches(loader, 2)
        assert lists(skipped) == [[6, 7, 8], [9]]
        assert lists(skipped) == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]
    assert lists(SkipDataLoader(Numbers(5), skip_batches=1, batch_size=2)) == [[2, 3], [4]]


def test_a_loader_that_iterates_in_its_own_way_is_warned_about() -> None:
    class Own(DataLoader):
        def __iter__(self) -> Any:
            return iter([])

    with pytest.warns(UserWarning, match="Own overrides __iter__"):
        prepare_data_loader(Own(range(3)))


def test_sizes() -> None:
    loader = prepare_data_loader(DataLoader(Numbers(10), batch_size=2), num_processes=3, process_index=1)
    assert (loader.batch_size, loader.total_batch_size, loader.total_dataset_length, len(loader)) == (2, 6, 10, 2)
    loader = prepare_data_loader(
        DataLoader(Numbers(10), batch_size=6), num_processes=3, process_index=1, split_batches=True
    )
    assert (loader.batch_size, loader.total_batch_size, loader.total_dataset_length, len(loader)) == (2, 6, 10, 2)
    assert loader.remainder == -1
    list(loader)
    assert isinstance(loader, DataLoaderShard)


def test_settings_can_be_changed_and_read_through_the_loader() -> None:
    loader = prepare_data_loader(DataLoader(Numbers(4), batch_size=2))
    loader.collate_fn = label
    assert list(loader) == ["0+1", "2+3"]
    with pytest.raises(ValueError, match="batch_size attribute should not be set"):
        loader.batch_size = 3


def test_a_sampler_can_be_replaced() -> None:
    loader = prepare_data_loader(DataLoader(Numbers(6), batch_size=2))
    loader.set_sampler([5, 3, 1])
    assert lists(loader) == [[5, 3], [1]]

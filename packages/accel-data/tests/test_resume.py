"""A resumed loader continues the uninterrupted one: samples, random numbers, and later epochs."""

from __future__ import annotations

import copy
import io
import pickle
import random
import sys
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from accel_data import DataLoaderShard, prepare_data_loader, skip_first_batches
from accel_data.resume_state import steps_of_torchdata
from accel_state.errors import ConfigurationError, MissingDependencyError
from accel_state.testing import run_world

LENGTH = 11


class Numbers(Dataset):
    def __init__(self) -> None:
        self.reads = 0

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> torch.Tensor:
        self.reads += 1
        return torch.tensor(index)


class Stream(IterableDataset):
    """Shuffled by the epoch, and split among workers."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Any:
        worker = torch.utils.data.get_worker_info()
        order = torch.randperm(LENGTH, generator=torch.Generator().manual_seed(self.epoch))
        yield from order[worker.id :: worker.num_workers] if worker else order


class Positioned(Stream):
    """An iterable data set that knows where it is, like those of Hugging Face."""

    def __init__(self) -> None:
        self.position = 0
        self.reads = 0

    def __iter__(self) -> Any:
        order = torch.randperm(LENGTH, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        while self.position < LENGTH:
            self.position += 1
            self.reads += 1
            yield torch.tensor(order[self.position - 1])
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


class Uneven(Positioned):
    """Workers with shares of different lengths, each of which knows where it is."""

    def __iter__(self) -> Any:
        worker = torch.utils.data.get_worker_info()
        while self.position < (3, LENGTH)[worker.id]:
            self.position += 1
            yield torch.tensor(100 * worker.id + self.position)
        self.position = 0


class FromNumpy:
    """A sampler that draws its order from a generator of the process, when an epoch begins."""

    def __iter__(self) -> Any:
        order = list(range(LENGTH))
        random.shuffle(order)
        return iter(np.random.permutation(order).tolist())

    def __len__(self) -> int:
        return LENGTH


class Buckets(BatchSampler):
    """Batches of several sizes."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(2)

    def __iter__(self) -> Any:
        order = torch.randperm(LENGTH, generator=self.generator).tolist()
        yield from (order[:1], order[1:4], order[4:6], order[6:10], order[10:])

    def __len__(self) -> int:
        return 5


def plain(kind: str, workers: int) -> DataLoader:
    shared = torch.Generator().manual_seed(1)
    options: dict[str, Any] = {"num_workers": workers, "persistent_workers": workers > 0}
    if kind == "buckets":
        return DataLoader(Numbers(), batch_sampler=Buckets(), **options)
    if kind == "iterable":
        return DataLoader(Stream(), batch_size=2, **options)
    if kind == "items":
        return DataLoader(Numbers(), batch_size=None, shuffle=True, generator=shared, **options)
    samplers = {
        "shared generator": {"shuffle": True, "generator": shared},
        "own generator": {"shuffle": True},
        "seedable": {"shuffle": True},
        "subset": {"sampler": SubsetRandomSampler(range(LENGTH))},
        "weighted": {"sampler": WeightedRandomSampler([1.0] * LENGTH, LENGTH, generator=shared)},
        "process generators": {"sampler": FromNumpy()},
        "sequential": {},
    }
    return DataLoader(Numbers(), batch_size=2, **samplers[kind], **options)


KINDS = [
    "shared generator",
    "own generator",
    "seedable",
    "subset",
    "weighted",
    "process generators",
    "sequential",
    "buckets",
    "items",
    "iterable",
]


def build(kind: str, workers: int = 0, world: int = 1, rank: int = 0, **options: Any) -> Any:
    return prepare_data_loader(
        plain(kind, workers),
        num_processes=world,
        process_index=rank,
        dispatch_batches=False,
        use_seedable_sampler=kind == "seedable",
        data_seed=9,
        **options,
    )


def random_state() -> tuple[Any, ...]:
    return torch.get_rng_state(), random.getstate(), np.random.get_state()


def set_random_state(state: tuple[Any, ...]) -> None:
    torch.set_rng_state(state[0])
    random.setstate(state[1])
    np.random.set_state(state[2])


def through_file(state: dict[str, Any]) -> dict[str, Any]:
    """A state survives a file that is loaded without running code."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


def run(loader: Any, epochs: int = 3) -> tuple[list[Any], list[tuple[int, dict[str, Any], Any]]]:
    """The batches of some epochs, and the state after each batch and between epochs, with the random numbers of the
    process.
    """
    batches: list[Any] = []
    saved = [(0, loader.state_dict(), random_state())]
    for _ in range(epochs):
        for batch in loader:
            batches.append(batch.tolist())
            saved.append((len(batches), copy.deepcopy(loader.state_dict()), random_state()))
        saved.append((len(batches), copy.deepcopy(loader.state_dict()), random_state()))
    return batches, saved


def continued(loader: Any, count: int) -> list[Any]:
    batches: list[Any] = []
    for _ in range(4):
        if len(batches) < count:
            batches += [batch.tolist() for batch in loader]
    return batches


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("world", "rank"), [(1, 0), (3, 0), (3, 2)])
def test_resuming_at_every_step_gives_the_uninterrupted_stream(kind: str, world: int, rank: int) -> None:
    batches, saved = run(build(kind, 0, world, rank))
    for position, state, rng in saved:
        set_random_state(rng)
        resumed = build(kind, 0, world, rank)
        resumed.load_state_dict(through_file(state))
        assert resumed.state_dict() is not None
        assert continued(resumed, len(batches) - position) == batches[position:], (position, state["position"])
        if hasattr(resumed.dataset, "reads"):
            assert resumed.dataset.reads == sum(
                len(batch) if isinstance(batch, list) else 1 for batch in batches[position:]
            )


# Workers take most of the time of this file; without them every kind is resumed in the fast tier.
SLOW_KINDS = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("own generator", "process generators", "buckets")]


@pytest.mark.parametrize("kind", ["shared generator", "iterable", *SLOW_KINDS])
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_resuming_with_workers(kind: str) -> None:
    batches, saved = run(build(kind, 2), epochs=2)
    for position, state, rng in saved[1 : len(saved) : 4]:
        set_random_state(rng)
        resumed = build(kind, 2)
        resumed.load_state_dict(state)
        assert continued(resumed, len(batches) - position) == batches[position:]


class Augmented(Dataset):
    """Samples with random numbers from every generator of the process."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, torch.rand(()).item(), np.random.rand(), random.random()], dtype=torch.float64)


class AugmentedStream(IterableDataset):
    def __iter__(self) -> Any:
        order = list(range(LENGTH))
        random.shuffle(order)
        return (Augmented()[index] for index in order)


def train(loader: Any, result: list[Any], saved: list[Any]) -> None:
    """A loop that draws random numbers itself, as dropout does, and could be stopped after any batch."""
    for _ in range(2):
        for batch in loader:
            result.append((batch.tolist(), torch.rand(()).item(), np.random.rand(), random.random()))
            saved.append((len(result), copy.deepcopy(loader.state_dict()), random_state()))


@pytest.mark.parametrize("data", [Augmented, AugmentedStream])
@pytest.mark.parametrize("world", [1, 2])
def test_random_numbers_of_loop_and_data_go_on_as_if_nothing_had_happened(data: Any, world: int) -> None:
    def loader() -> Any:
        shuffle = None if data is AugmentedStream else True
        return prepare_data_loader(
            DataLoader(data(), batch_size=2, shuffle=shuffle),
            num_processes=world,
            process_index=0,
            dispatch_batches=False,
        )

    result: list[Any] = []
    saved: list[Any] = []
    train(loader(), result, saved)
    for position, state, rng in saved:
        resumed = loader()
        resumed.load_state_dict(through_file(state))
        set_random_state(rng)
        rest: list[Any] = []
        train(resumed, rest, [])
        assert rest[: len(result) - position] == result[position:]


@pytest.mark.parametrize("kind", ["shared generator", "seedable", "sequential", "iterable"])
@pytest.mark.parametrize(("before", "after"), [(1, 4), (4, 1), (4, 2), (2, 3), (3, 1)])
def test_another_number_of_ranks_loses_and_repeats_nothing(kind: str, before: int, after: int) -> None:
    ranks = [build(kind, 0, before, rank) for rank in range(before)]
    iterators = [iter(loader) for loader in ranks]
    seen: list[int] = []
    for loader, iterator in zip(ranks, iterators, strict=True):
        batch = next(iterator).tolist()
        seen += batch[: loader.real_samples]
    states = [loader.state_dict() for loader in ranks]
    assert {state["position"] for state in states} == {min(2 * before, LENGTH)}
    resumed = [build(kind, 0, after, rank) for rank in range(after)]
    rest: list[list[int]] = []
    for loader in resumed:
        loader.load_state_dict(states[0])
        rest.append([x for batch in loader for x in batch.tolist()[: loader.real_samples]])
    assert sorted(seen + [x for part in rest for x in part]) == list(range(LENGTH))


def test_a_state_is_that_of_the_loader_when_a_skipped_one_is_iterated() -> None:
    loader = build("shared generator")
    skipped = skip_first_batches(loader, 2)
    next(iter_skipped := iter(skipped))
    assert loader.state_dict()["position"] == 6
    del iter_skipped
    assert loader.state_dict()["epoch"] == 1


def test_a_skip_after_loading_counts_from_the_start_of_the_epoch() -> None:
    """Scripts that skip batches themselves keep working when the position is restored too."""
    batches, saved = run(build("own generator"), epochs=2)
    _, state, rng = saved[3]
    set_random_state(rng)
    resumed = build("own generator")
    resumed.load_state_dict(state)
    assert [batch.tolist() for batch in skip_first_batches(resumed, 3)] == batches[3:6]
    assert [batch.tolist() for batch in resumed] == batches[6:]


def test_set_epoch_keeps_a_loaded_position_in_that_epoch_and_drops_it_for_another() -> None:
    batches, saved = run(build("seedable"), epochs=3)
    _, state, _ = saved[9]
    assert (state["epoch"], state["position"]) == (1, 4)
    resumed = build("seedable")
    resumed.load_state_dict(state)
    resumed.set_epoch(1)
    assert [batch.tolist() for batch in resumed] == batches[8:12]
    resumed.load_state_dict(state)
    resumed.set_epoch(2)
    assert [batch.tolist() for batch in resumed] == batches[12:]


def test_states_of_other_loaders_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="not the state of a prepared loader"):
        build("sequential").load_state_dict({"yielded": 3})
    with pytest.raises(ConfigurationError, match="RandomSampler"):
        build("own generator").load_state_dict({"_num_yielded": 3})
    middle = dict(build("buckets").state_dict(), position=1)
    with pytest.raises(ConfigurationError, match="counts batches.*counts samples"):
        build("sequential").load_state_dict(middle)
    workers = build("iterable", 2)
    state = dict(workers.state_dict(), position=2)
    with pytest.raises(ConfigurationError, match="num_workers=2.*num_workers=1"):
        build("iterable", 1).load_state_dict(state)
    with pytest.raises(ConfigurationError, match="from 1 process"):
        build("iterable", 2, 2).load_state_dict(state)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["shared generator", "own generator", "iterable"])
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_on_torchdatas_loader(kind: str, workers: int) -> None:
    pytest.importorskip("torchdata.stateful_dataloader")
    batches, saved = run(build(kind, workers, use_stateful_dataloader=True), epochs=2)
    assert batches == run(build(kind, workers), epochs=2)[0] or kind == "own generator"
    for position, state, rng in saved[:: 1 if workers == 0 else 4]:
        set_random_state(rng)
        resumed = build(kind, workers, use_stateful_dataloader=True)
        resumed.load_state_dict(state)
        assert continued(resumed, len(batches) - position) == batches[position:]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_an_epoch_is_resumed_again_and_again_on_torchdata(workers: int) -> None:
    """torchdata itself loses count of data without a state of its own in the second restart of an epoch."""
    pytest.importorskip("torchdata.stateful_dataloader")
    batches = [batch.tolist() for batch in build("iterable", workers, use_stateful_dataloader=True)]
    loader, found = build("iterable", workers, use_stateful_dataloader=True), []
    for count in (2, 3):
        iterator = iter(loader)
        found += [next(iterator).tolist() for _ in range(count)]
        state = through_file(loader.state_dict())
        iterator.close()
        loader = build("iterable", workers, use_stateful_dataloader=True)
        loader.load_state_dict(state)
    assert found + [batch.tolist() for batch in loader] == batches


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_a_worker_that_is_through_does_not_begin_again_on_torchdata() -> None:
    pytest.importorskip("torchdata.stateful_dataloader")

    def loader() -> Any:
        return prepare_data_loader(DataLoader(Uneven(), batch_size=2, num_workers=2), use_stateful_dataloader=True)

    batches, saved = run(loader(), epochs=1)
    for position, state, _ in (saved[6], saved[len(batches)]):
        resumed = loader()
        resumed.load_state_dict(through_file(state))
        assert [batch.tolist() for batch in resumed] == batches[position:]
        assert len(list(resumed)) == len(batches)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_a_state_of_torchdata_is_continued(workers: int, world: int) -> None:
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")
    theirs = torchdata.StatefulDataLoader(Numbers(), batch_size=2, num_workers=workers)
    iterator = iter(theirs)
    next(iterator), next(iterator)
    state = theirs.state_dict()
    del iterator, theirs
    resumed = build("sequential", 0, world)
    resumed.load_state_dict(state)
    assert [batch.tolist() for batch in resumed] == [batch.tolist() for batch in build("sequential", 0, world)][2:]
    assert len(list(resumed)) == len(resumed)


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["shared generator", "own generator", "sequential", "iterable"])
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_a_stateful_loader_is_one_of_torchdata(kind: str, workers: int) -> None:
    """It is an instance of StatefulDataLoader, and its state has torchdata's keys, with the right counts."""
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")
    theirs = torchdata.StatefulDataLoader(plain(kind, 0).dataset, batch_size=2, num_workers=workers)
    iterator = iter(theirs)
    next(iterator)
    loader = build(kind, workers, use_stateful_dataloader=True)
    batches = [batch.tolist() for batch in build(kind, workers, use_stateful_dataloader=True)]
    for count in (2, 4):  # then resumed in the middle of the epoch
        assert isinstance(loader, torchdata.StatefulDataLoader) and isinstance(loader, DataLoaderShard)
        assert isinstance(skip_first_batches(loader, 1), torchdata.StatefulDataLoader)
        found = iter(loader)
        while steps_of_torchdata(without_ours(loader.state_dict())) != count:
            next(found)
        state = through_file(loader.state_dict())
        assert set(theirs.state_dict()) <= set(state)
        copied = pickle.loads(pickle.dumps(loader))
        found.close()
        loader = build(kind, workers, use_stateful_dataloader=True)
        loader.load_state_dict(state)
        assert loader.state_dict().keys() == state.keys()
    if kind != "own generator":  # each of which has its own order
        assert [batch.tolist() for batch in loader] == batches[4:]
        assert loader.state_dict()["_iterator_finished"]
    assert isinstance(copied, torchdata.StatefulDataLoader) and copied.state_dict()["epoch"] == 1
    assert type(copied) is type(loader) and copied.batch_size == loader.batch_size
    assert not isinstance(build(kind, workers), torchdata.StatefulDataLoader)


def without_ours(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in state.items() if name != "format"}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["random", "positioned", "stream"])
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_a_state_of_torchdata_continues_in_its_order(kind: str, workers: int) -> None:
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")

    def loader(seed: int) -> Any:
        options: dict[str, Any] = {"batch_size": 2, "num_workers": workers}
        if kind == "random":
            generator = torch.Generator().manual_seed(seed)
            return torchdata.StatefulDataLoader(Numbers(), shuffle=True, generator=generator, **options)
        return torchdata.StatefulDataLoader(Positioned() if kind == "positioned" else Stream(), **options)

    theirs = loader(1)
    iterator = iter(theirs)
    for _ in range(3):
        next(iterator)
    state = theirs.state_dict()
    rest = [batch.tolist() for batch in iterator]
    resumed = prepare_data_loader(loader(2), use_stateful_dataloader=True)
    resumed.load_state_dict(state)
    assert [batch.tolist() for batch in resumed] == rest


@pytest.mark.parametrize("world", [1, 2])
def test_a_data_set_that_knows_its_position_is_not_read_again(world: int) -> None:
    pytest.importorskip("torchdata.stateful_dataloader")

    def loader() -> Any:
        return prepare_data_loader(
            DataLoader(Positioned(), batch_size=2),
            num_processes=world,
            process_index=0,
            dispatch_batches=False,
            use_stateful_dataloader=True,
        )

    batches, saved = run(loader(), epochs=1)
    for position, state, _ in saved[1:-2]:
        resumed = loader()
        resumed.load_state_dict(through_file(state))
        assert continued(resumed, len(batches) - position) == batches[position:]
        inner = resumed.dataset if world == 1 else resumed.dataset.dataset
        assert inner.reads <= LENGTH - position * 2 * world + 2 * world


def test_without_torchdata_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchdata", None)
    monkeypatch.delitem(sys.modules, "torchdata.stateful_dataloader", raising=False)
    with pytest.raises(MissingDependencyError, match=r"pip install 'accel-data\[stateful\]'"):
        build("sequential", use_stateful_dataloader=True)
    assert [batch.tolist() for batch in skip_first_batches(DataLoader(range(4), batch_size=2), 1)] == [[2, 3]]


def continue_from(path: str) -> list[Any]:
    """In a new process: load a state and return the samples that follow."""
    torch.manual_seed(12345)
    loader = build("shared generator", 0, 2, 1)
    loader.load_state_dict(torch.load(path, weights_only=True))
    return [batch.tolist() for _ in range(2) for batch in loader]


def test_in_a_new_process(tmp_path: Path) -> None:
    loader = build("shared generator", 0, 2, 1)
    iterator = iter(loader)
    next(iterator), next(iterator)
    torch.save(loader.state_dict(), tmp_path / "loader.pt")
    rest = [batch.tolist() for batch in iterator] + [batch.tolist() for batch in loader]
    assert run_world(continue_from, 1, str(tmp_path / "loader.pt"), state=False) == [rest]


def test_every_combination_of_samplers_and_ranks_has_a_state_of_plain_values() -> None:
    for kind, world in product(KINDS, (1, 2)):
        loader = build(kind, 0, world)
        next(iterator := iter(loader))
        assert torch.equal(
            *[torch.tensor(state["position"]) for state in (loader.state_dict(), through_file(loader.state_dict()))]
        )
        del iterator

"""Worlds of gloo ranks: their samples together are the data set, and they agree on every step."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from accel_data import PreparedLoader, prepare_data_loader, skip_first_batches
from accel_data.batch_ops import count_samples, slice_batch
from accel_data.batch_scatter import ReadError, UnsendableError
from accel_state import testing
from accel_state.state import PartialState
from accel_state.testing import WorldError, run_world

pytestmark = pytest.mark.timeout(300)


class Numbers(Dataset):
    def __init__(self, length: int) -> None:
        self.length = length
        self.reads = 0

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.reads += 1
        return {"x": torch.tensor(index), "name": f"sample {index}", "mask": torch.full((2,), index % 2 == 0)}


class Stream(IterableDataset):
    def __init__(self, length: int, fail_at: int | None = None) -> None:
        self.length = length
        self.fail_at = fail_at
        self.reads = 0

    def __iter__(self) -> Any:
        for index in range(self.length):
            if index == self.fail_at:
                raise LookupError(f"no sample {index}")
            self.reads += 1
            yield {"x": torch.tensor(index), "name": f"sample {index}"}


class Sources(IterableDataset):
    """Like an iterable data set of Hugging Face: sources that can be dealt to the ranks."""

    def __init__(self, sources: list[list[int]]) -> None:
        self.sources = sources
        self.num_shards = len(sources)
        self.reads = 0

    def shard(self, num_shards: int, index: int) -> Sources:
        return Sources(self.sources[index::num_shards])

    def __iter__(self) -> Any:
        for source in self.sources:
            for number in source:
                self.reads += 1
                yield torch.tensor(number)


class Ragged:
    """A batch sampler whose batches are of any size."""

    def __init__(self, batches: list[list[int]]) -> None:
        self.batches = batches

    def __iter__(self) -> Any:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


def gather_names(loader: PreparedLoader) -> tuple[list[str], int]:
    """What gather_for_metrics is to make of an epoch: the real samples of every step, in the order of ranks."""
    collectives = PartialState().collectives
    names: list[str] = []
    steps = 0
    for batch in loader:
        rows = count_samples(batch)
        local = slice_batch(batch, 0, rows if loader.real_samples is None else loader.real_samples)["name"]
        if loader.ragged:
            step = [name for part in collectives.all_gather_object(local) for name in part]
        else:
            parts = collectives.all_gather_object(batch["name"])
            assert len({len(part) for part in parts}) == 1, (
                f"ragged is False, and the sizes are {[len(part) for part in parts]}"
            )
            step = [name for part in parts for name in part]
            if loader.end_of_dataloader and loader.remainder > 0:
                step = step[: loader.remainder]
        names += step
        steps += 1
        ends = collectives.all_gather_object(loader.end_of_dataloader)
        assert len(set(ends)) == 1, f"the ranks disagree on the last batch: {ends}"
    assert steps == 0 or ends[0], "the last batch was not announced"
    return names, steps


def check_order(lengths: list[int], batch_sizes: list[int]) -> int:
    """Every kind of loader gives back the data set in order."""
    state = PartialState()
    world = state.num_processes
    checked = 0
    for length, size, split, drop_last, dispatch, iterable in product(lengths, batch_sizes, *[(False, True)] * 4):
        batch_size = size * world if split else size
        dataset = Stream(length) if iterable else Numbers(length)
        loader = prepare_data_loader(
            DataLoader(dataset, batch_size=batch_size, drop_last=drop_last),
            put_on_device=True,
            split_batches=split,
            dispatch_batches=dispatch,
        )
        names, steps = gather_names(loader)
        expected = length // (size * world) * size * world if drop_last else length
        label = dict(length=length, size=size, split=split, drop_last=drop_last, dispatch=dispatch, iterable=iterable)
        assert names == [f"sample {i}" for i in range(expected)], (label, names)
        assert steps == -(-expected // (size * world)), (label, steps)
        if dispatch and state.process_index > 0:
            assert dataset.reads == 0, label
        checked += 1
    return checked


@pytest.mark.slow  # all loaders in 2 and 4 ranks; test_loaders_in_a_world is fast
@pytest.mark.parametrize("world", [2, 4])
def test_gathered_epochs_are_the_data_set_in_order(world: int) -> None:
    counts = run_world(check_order, world, [0, 1, 3, 8, 9, 13], [1, 2], timeout=280)
    assert counts == [192] * world


def check_everything_else() -> None:
    check_shuffle_is_shared()
    check_sources_are_read_once()
    check_empty_rank()
    check_declared_parts()
    check_distributed_sampler()
    check_dynamic_batches()
    check_dispatch_of_unequal_shapes()
    check_positions_agree()
    check_abandoned_dispatch()
    check_items()


def check_shuffle_is_shared() -> None:
    state = PartialState()
    torch.manual_seed(100 + state.process_index)
    for options in ({}, {"use_seedable_sampler": True}):
        loader = prepare_data_loader(DataLoader(Numbers(13), batch_size=2, shuffle=True), **options)
        epochs = [gather_names(loader)[0] for _ in range(3)]
        for names in epochs:
            assert sorted(names, key=lambda name: int(name.split()[1])) == [f"sample {i}" for i in range(13)]
        assert epochs[0] != epochs[1] != epochs[2]


def check_sources_are_read_once() -> None:
    state = PartialState()
    sources = [list(range(0, 10)), list(range(10, 13)), list(range(13, 14)), list(range(14, 40))]
    loader = prepare_data_loader(DataLoader(Sources(sources), batch_size=3), put_on_device=True)
    assert loader.ragged
    seen, steps = [], 0
    for batch in loader:
        real = len(batch) if loader.real_samples is None else loader.real_samples
        seen += [x for part in state.collectives.all_gather_object(batch[:real].tolist()) for x in part]
        steps += 1
    assert sorted(seen) == list(range(40))
    assert set(state.collectives.all_gather_object(steps)) == {steps}
    assert loader.end_of_dataloader
    assert sum(state.collectives.all_gather_object(loader.dataset.reads)) == 40


def check_empty_rank() -> None:
    state = PartialState()
    loader = prepare_data_loader(DataLoader(Sources([[1, 2, 3], *[[]] * (state.num_processes - 1)]), batch_size=2))
    seen = []
    for batch in loader:
        real = len(batch) if loader.real_samples is None else loader.real_samples
        seen += [x for part in state.collectives.all_gather_object(batch[:real].tolist()) for x in part]
    assert seen == [1, 2, 3]


def check_declared_parts() -> None:
    state = PartialState()
    own = list(range(state.process_index * 10, state.process_index * 10 + 3 + state.process_index))
    plain = DataLoader(own, batch_size=2)
    plain.already_sharded = True
    for loader in (
        prepare_data_loader(plain),
        prepare_data_loader(DataLoader(own, batch_size=2), already_sharded=True),
    ):
        seen = []
        for batch in loader:
            real = len(batch) if loader.real_samples is None else loader.real_samples
            seen += batch[:real].tolist()
        assert seen == own


def check_distributed_sampler() -> None:
    state = PartialState()
    for length, drop_last in product((1, 7, 9, 12), (False, True)):
        data = list(range(length))
        sampler = DistributedSampler(data, shuffle=False)
        loader = prepare_data_loader(DataLoader(data, batch_size=2, sampler=sampler, drop_last=drop_last))
        seen = []
        for batch in loader:
            real = len(batch) if loader.real_samples is None else loader.real_samples
            seen += [x for part in state.collectives.all_gather_object(batch[:real].tolist()) for x in part]
        if drop_last:
            assert len(seen) == len(set(seen))
        else:
            assert sorted(seen) == data, (length, seen)


def check_dynamic_batches() -> None:
    batches = [[0], [1, 2], [3, 4, 5], [6], [7, 8, 9, 10], [11], [12, 13]]
    for dispatch, count in product((False, True), range(len(batches) + 1)):
        length = sum(map(len, batches[:count]))
        loader = prepare_data_loader(
            DataLoader(Numbers(14), batch_sampler=Ragged(batches[:count])), dispatch_batches=dispatch
        )
        names, _ = gather_names(loader)
        assert names == [f"sample {i}" for i in range(length)], (dispatch, count, names)


def pad_to_longest(samples: list[dict[str, Any]]) -> dict[str, Any]:
    longest = max(int(sample["x"]) for sample in samples) + 1
    return {
        "x": torch.stack([torch.full((longest,), int(s["x"])) for s in samples]),
        "name": [s["name"] for s in samples],
    }


def check_dispatch_of_unequal_shapes() -> None:
    """Batches padded to lengths of their own, the last round incomplete: nothing can be cut, and nothing is lost."""
    for length in (5, 6, 9):
        loader = prepare_data_loader(
            DataLoader(Stream(length), batch_size=2, collate_fn=pad_to_longest), dispatch_batches=True
        )
        names, _ = gather_names(loader)
        assert names == [f"sample {i}" for i in range(length)]


def build_21(dispatch: bool, iterable: bool) -> Any:
    data = Stream(21) if iterable else Numbers(21)
    plain = DataLoader(
        data, batch_size=2, shuffle=None if iterable else True, generator=torch.Generator().manual_seed(5)
    )
    return prepare_data_loader(plain, dispatch_batches=dispatch, put_on_device=True)


def check_positions_agree() -> None:
    """A state is the same on every rank, and continues where it was taken, without reading what was handed out."""
    collectives = PartialState().collectives
    for dispatch, iterable in product((False, True), (False, True)):
        loader = build_21(dispatch, iterable)
        whole, states = [], []
        for _ in range(2):
            for batch in loader:
                whole.append(batch["name"])
                states.append(copy.deepcopy(loader.state_dict()))
        positions = collectives.all_gather_object([state["position"] for state in states])
        assert all(position == positions[0] for position in positions)
        for taken in range(0, len(whole), 2):
            resumed = build_21(dispatch, iterable)
            # One rank saves; all of them load what it saved.
            resumed.load_state_dict(collectives.broadcast_object(states[taken]))
            rest = [batch["name"] for batch in resumed]
            rest += [batch["name"] for batch in resumed] if len(rest) + taken + 1 < len(whole) else []
            assert rest == whole[taken + 1 :], (dispatch, iterable, taken, rest, whole[taken + 1 :])


def check_abandoned_dispatch() -> None:
    loader = prepare_data_loader(DataLoader(Stream(20), batch_size=1), dispatch_batches=True, put_on_device=True)
    for batch in loader:
        first = batch["name"]
        break
    assert gather_names(loader)[0] == [f"sample {i}" for i in range(20)]
    rest = [batch["name"] for batch in skip_first_batches(loader, 1)]
    assert first not in rest
    alive = weakref.ref(loader)
    iterator = iter(loader)
    next(iterator)
    del loader, iterator
    gc.collect()
    assert alive() is None


def check_items() -> None:
    """batch_size=None: every item is a batch of its own making."""
    state = PartialState()
    data = list(torch.arange(28).split([1, 2, 3, 4, 5, 6, 7]))
    for loader in (
        prepare_data_loader(DataLoader(data, batch_size=None)),
        prepare_data_loader(DataLoader(data, batch_size=None), dispatch_batches=True),
        prepare_data_loader(DataLoader(_Items(data), batch_size=None), dispatch_batches=False),
        prepare_data_loader(DataLoader(_Items(data), batch_size=None), dispatch_batches=True),
    ):
        seen = []
        for batch in loader:
            real = len(batch) if loader.real_samples is None else loader.real_samples
            seen += [x for part in state.collectives.all_gather_object(batch[:real].tolist()) for x in part]
        assert seen == list(range(28))


class _Items(IterableDataset):
    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __iter__(self) -> Any:
        return iter(self.items)


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])  # the same on more ranks
def test_loaders_in_a_world(world: int) -> None:
    run_world(check_everything_else, world, timeout=280)


def read_failing(dispatch: bool, sources: bool) -> None:
    if sources:
        data: Any = Failing()
        loader = prepare_data_loader(DataLoader(data, batch_size=1), already_sharded=True)
    else:
        loader = prepare_data_loader(
            DataLoader(Stream(20, fail_at=9), batch_size=2), dispatch_batches=dispatch, put_on_device=True
        )
    for _ in loader:
        pass


class Failing(IterableDataset):
    """Fails on rank 1 only."""

    def __iter__(self) -> Any:
        yield torch.tensor(0)
        if PartialState().process_index == 1:
            raise LookupError("no sample on this rank")
        yield from torch.arange(10)


@pytest.fixture
def all_ranks_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """What every rank raises is compared: the slowest gets all the time that it needs."""
    monkeypatch.setattr(testing, "_GRACE_SECONDS", 200.0)


@pytest.mark.usefixtures("all_ranks_end")
def test_an_error_on_the_reading_rank_is_raised_on_every_rank() -> None:
    with pytest.raises(WorldError) as failure:
        run_world(read_failing, 2, True, False, timeout=280)
    assert not failure.value.timed_out
    assert "LookupError: no sample 9" in failure.value.reports[0]
    assert "rank 0 failed to read the data" in failure.value.reports[1]
    assert "LookupError: no sample 9" in failure.value.reports[1]


@pytest.mark.usefixtures("all_ranks_end")
def test_an_error_in_one_ranks_source_stops_the_others() -> None:
    with pytest.raises(WorldError) as failure:
        run_world(read_failing, 2, False, True, timeout=280)
    assert not failure.value.timed_out
    assert "another rank failed to read data" in failure.value.reports[0]
    assert "LookupError: no sample on this rank" in failure.value.reports[1]


def describe_batch(samples: list[dict[str, Any]]) -> dict[str, Any]:
    values = [int(sample["x"]) for sample in samples]
    counts = {"tokens": torch.tensor(sum(values)), "n": len(values), "ids": set(values)}
    return {"x": torch.tensor(values), "span": range(values[0], values[-1] + 1), "text": str(values), "more": [counts]}


def describe_dispatched() -> None:
    for length, batch_size in ((14, 4), (22, 4), (3, 2), (13, 3)):
        plain = DataLoader(Stream(length), batch_size=batch_size, collate_fn=describe_batch)
        loader = prepare_data_loader(plain, dispatch_batches=True)
        seen = []
        for batch in loader:
            values = batch["x"].tolist()
            assert batch.pop("x") is not None
            expected = describe_batch([{"x": value} for value in values])
            assert repr(batch) == repr({key: expected[key] for key in batch})
            seen += values if loader.real_samples is None else values[: loader.real_samples]
        parts = PartialState().collectives.all_gather_object(seen)
        assert sorted([value for part in parts for value in part]) == list(range(length))


def test_dispatched_values_describe_the_samples_they_come_with() -> None:
    run_world(describe_dispatched, 2)


def unsendable(kind: str, size: int) -> Any:
    if kind == "sparse":
        return torch.eye(size).to_sparse()
    if kind == "compressed":
        return torch.eye(size).to_sparse_csr()
    if kind == "jagged":
        return torch.nested.nested_tensor([torch.ones(i + 1) for i in range(size)], layout=torch.jagged)
    if kind == "nested":
        return torch.nested.nested_tensor([torch.ones(i + 1) for i in range(size)])
    if kind == "quantized":
        return torch.quantize_per_tensor(torch.ones(size), 0.1, 0, torch.qint8)
    return {"function": lambda: size, "lock": threading.Lock(), "generator": (i for i in range(size))}[kind]


UNSENDABLE = ("sparse", "compressed", "jagged", "nested", "quantized", "function", "lock", "generator")


def refuse_unsendable() -> list[str]:
    messages = []
    for kind, length in product(UNSENDABLE, (8, 6)):  # a full step of 4 4, and one of 4 2
        plain = DataLoader(
            Stream(length),
            batch_size=4,
            collate_fn=lambda samples: {
                "x": torch.zeros(len(samples)),
                "inner": ({"value": unsendable(kind, len(samples))},),  # noqa: B023 - the loader is read at once
            },
        )
        with pytest.raises((UnsendableError, ReadError)) as refused:
            list(prepare_data_loader(plain, dispatch_batches=True))
        messages.append(str(refused.value))
    # The ranks are still in step.
    assert PartialState().collectives.all_gather_object(1) == [1, 1]
    return messages


def test_values_that_cannot_be_sent_are_refused_with_their_key() -> None:
    for messages in run_world(refuse_unsendable, 2):
        assert len(messages) == 2 * len(UNSENDABLE)
        for message in messages:
            assert "batch['inner'][0]['value'] is a " in message
            assert "dispatch_batches=False" in message


def bytes_of_dispatched_steps(ragged: bool) -> tuple[list[int], list[int], list[int]]:
    """Sizes of the messages of an epoch of 3 steps, except small ones, and what this rank read."""
    collectives = PartialState().collectives
    sizes: dict[str, list[int]] = {"broadcast": [], "scatter": []}

    def counted(call: Any, found: list[int], tensor: Any, *arguments: Any) -> Any:
        if tensor.numel() * tensor.element_size() > 4000:
            found.append(tensor.numel() * tensor.element_size())
        return call(tensor, *arguments)

    for name, found in sizes.items():
        setattr(collectives, name, partial(counted, getattr(collectives, name), found))
    rows = torch.arange(23 if ragged else 24).repeat_interleave(1000).view(-1, 1000)
    loader = prepare_data_loader(DataLoader(rows, batch_size=4), dispatch_batches=True, even_batches=False)
    read = [int(row[0]) for batch in loader for row in batch]
    delattr(collectives, "broadcast"), delattr(collectives, "scatter")
    return sizes["broadcast"], sizes["scatter"], read


def bytes_of_both() -> list[tuple[list[int], list[int], list[int]]]:
    return [bytes_of_dispatched_steps(ragged) for ragged in (False, True)]


def test_a_dispatched_batch_goes_to_its_rank_only() -> None:
    for rows, ranks in zip((24, 23), zip(*run_world(bytes_of_both, 2), strict=True), strict=True):
        for broadcast, scatter, _ in ranks:
            assert broadcast == [] and scatter == [4 * 8000] * 3  # a batch of 4 rows of 1000 numbers, not two
        assert sorted([*ranks[0][2], *ranks[1][2]]) == list(range(rows))

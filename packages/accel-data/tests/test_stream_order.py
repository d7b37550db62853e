"""Streams that every rank reads to keep its part, but that differ between ranks: samples would be lost in silence."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

from accel_data import prepare_data_loader
from accel_data.rank_comparison import compare_stream_order
from accel_data.stream_order import describe, differing_path
from accel_state.state import PartialState
from accel_state.testing import run_world

SAMPLES = set(range(24))


def image(number: int) -> torch.Tensor:
    return torch.full((2, 2), float(number))


@pytest.mark.parametrize(
    ("first", "second", "path"),
    [
        ([1, 2], [1, 2], None),
        ([1, 2], [2, 1], ""),
        (["a", "b"], ["b", "a"], ""),
        ([b"a", b"b"], [b"b", b"a"], ""),
        ([0.5, 1.5], [1.5, 0.5], ""),
        ([np.int64(1), np.int64(2)], [np.int64(2), np.int64(1)], ""),
        ([np.ones(2), np.zeros(2)], [np.zeros(2), np.ones(2)], ""),
        ([image(1), image(2)], [image(2), image(1)], ""),
        (
            [{"x": image(1), "id": "a"}, {"x": image(2), "id": "b"}],
            [{"x": image(3), "id": "a"}, {"x": image(4), "id": "b"}],
            None,
        ),
        (
            [{"x": image(1), "id": "a"}, {"x": image(2), "id": "b"}],
            [{"x": image(1), "id": "b"}, {"x": image(1), "id": "a"}],
            ".x",
        ),
        # A value that is the same in all samples does not tell that they are the same ones.
        ([("text", 1), ("text", 2)], [("text", 2), ("text", 1)], ".1"),
        ([(image(1), [1]), (image(2), [2])], [(image(3), [1]), (image(4), [2])], None),
        ([1, 2], [{"x": 1}, {"x": 2}], ""),
        ([object(), object()], [object(), object()], None),
        ([np.array(["a"]), np.array(["b"])], [np.array(["b"]), np.array(["a"])], None),  # not looked at
    ],
)
def test_descriptions_of_the_first_samples(first: list[Any], second: list[Any], path: str | None) -> None:
    assert differing_path(describe(first), describe(second)) == path
    assert differing_path(describe(first), describe(first)) is None


class Drawn(IterableDataset[Any]):
    """Samples 0 to 23 in an order drawn from torch's global generator, made by a function."""

    def __init__(self, make: Callable[[int], Any], shuffle: bool = True) -> None:
        self.make, self.shuffle = make, shuffle

    def __iter__(self) -> Iterator[Any]:
        yield from map(self.make, torch.randperm(24).tolist() if self.shuffle else range(24))


class Own(IterableDataset[int]):
    """The samples of this rank, which it knows from a function."""

    def __init__(self, own: Callable[[], Any]) -> None:
        self.own = own

    def __iter__(self) -> Iterator[int]:
        return iter(self.own())


def streams() -> dict[str, tuple[Any, dict[str, Any]]]:
    """Streams by name, and how each is prepared; those of lower case yield the same on every rank."""
    synchronized = {"rng_types": ["torch"]}
    return {
        "Numbers": (Drawn(lambda n: n), {}),
        "Records": (Drawn(lambda n: {"x": torch.rand(2), "id": n}), {}),
        "Split": (Own(lambda: range(dist.get_rank(), 24, dist.get_world_size())), {}),
        "copied": (Drawn(lambda n: n), synchronized),
        "augmented": (Drawn(lambda n: {"x": torch.rand(2), "id": n}, False), {}),
        "declared": (Own(lambda: range(dist.get_rank(), 24, dist.get_world_size())), {"already_sharded": True}),
        "dispatched": (Drawn(lambda n: n), {"dispatch_batches": True}),
    }


def numbers(batch: Any) -> list[int]:
    values: list[int] = (batch["id"] if isinstance(batch, dict) else batch).tolist()
    return values


def read(workers: int) -> dict[str, tuple[list[list[int]], list[str]]]:
    state, found = PartialState(), {}
    logger = logging.getLogger(compare_stream_order.__module__)
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    for name, (stream, arguments) in streams().items():
        stream.__class__ = type(name, (type(stream),), {})  # each is reported once, by its name
        torch.manual_seed(state.process_index)
        messages.clear()
        # The streams are made by functions that only a fork has.
        context = "fork" if workers else None
        loader = DataLoader(stream, batch_size=2, num_workers=workers, multiprocessing_context=context)
        loader = prepare_data_loader(loader, **arguments)
        epochs = [[number for batch in loader for number in numbers(batch)] for _ in range(2)]
        state.wait_for_everyone()
        found[name] = epochs, messages[:]
    logger.removeHandler(handler)
    return found


def check(ranks: list[dict[str, tuple[list[list[int]], list[str]]]]) -> None:
    for name in ranks[0]:
        messages = [message for rank in ranks for message in rank[name][1]]
        for epoch in range(2):
            whole = {number for rank in ranks for number in rank[name][0][epoch]} == SAMPLES
            assert whole is name.islower(), name
        if name.islower():
            assert messages == [], name
            continue
        # The rank that came later reports it, once; or both, if neither saw that the other was there.
        assert 1 <= len(messages) <= 2, (name, messages)
        assert all(f"{name} yields different samples" in message for message in messages)
        assert all("already_sharded=True" in each and "dispatch_batches=True" in each for each in messages)
        assert all("(x)" in message for message in messages) is (name == "Records"), messages


def test_streams_whose_samples_differ_between_ranks_are_reported() -> None:
    check(run_world(read, 2, 0))


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "workers"), [(4, 0), (2, 1)])
def test_streams_of_four_ranks_and_of_workers_are_compared_too(ranks: int, workers: int) -> None:
    check(run_world(read, ranks, workers, timeout=280))

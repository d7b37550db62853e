"""Steps that are dealt to replicas: the samples and the random numbers of a step do not depend on who computes it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from accel_data import DataLoaderConfiguration, prepare_data_loader
from accel_data.dealt import DealtBatch, DealtLoader, deal_steps, unit_seed
from accel_state.errors import ConfigurationError


class Table(Dataset[Any]):
    """Samples with their own index, and three random numbers that are drawn when they are read."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([index, torch.rand(()).item(), np.random.rand(), random.random()], dtype=torch.float64)


class Hand:
    """Deals each attempt at a step to the replicas that a plan names, and votes as the plan says."""

    def __init__(self, num_shards: int, window: int, attempts: list[tuple[int, int, bool]]) -> None:
        self.num_shards, self.window, self.attempts = num_shards, window, attempts
        self.seed, self.is_training = 5, True
        self.batch: DealtBatch | None = None
        self.loader: DealtLoader | None = None

    def open_step(self, loader: DealtLoader) -> Sequence[int]:
        self.loader = loader
        rank, size, self.commits = self.attempts.pop(0) if self.attempts else (0, 1, True)
        return range(rank, self.num_shards, size)

    def begin_batch(self, batch: DealtBatch) -> None:
        self.batch = batch

    def end_step(self, loader: DealtLoader) -> None:
        if self.commits:
            loader.commit()


def dealt(hand: Hand, length: int = 50, batch_size: int = 3, **settings: Any) -> DealtLoader:
    loader = DataLoader(Table(length), batch_size=batch_size, shuffle=True, **settings)
    prepared = prepare_data_loader(loader, num_processes=1, process_index=0, use_seedable_sampler=True, data_seed=7)
    return deal_steps(prepared, hand)


def read(hand: Hand, epochs: int = 1, **settings: Any) -> dict[tuple[int, int], list[Any]]:
    """What each (batch of a committed step, shard) had, with a number drawn by the model."""
    loader, table, attempt = dealt(hand, **settings), {}, []
    for epoch in range(epochs):
        for batch in loader:
            place = hand.batch
            assert place is not None
            _, step = loader.position
            attempt.append(((epoch * 1000 + step + place.index, place.shard), [batch.tolist(), torch.rand(()).item()]))
            if place.is_last and hand.commits:
                assert loader.end_of_dataloader == (step + place.window == len(loader))
                if place.counts:
                    table.update(attempt)
            if place.is_last:
                attempt = []
    return table


@pytest.mark.parametrize("window", [1, 2])
def test_a_step_is_the_same_whoever_computes_it(window: int) -> None:
    """Two replicas, three, an aborted step that is dealt anew, and a spare agree with one that computes everything."""
    whole = read(Hand(4, window, []), epochs=2)
    steps = -(-50 // 12)
    assert len(whole) == 2 * steps * 4
    ranks = [
        prepare_data_loader(
            DataLoader(Table(50), batch_size=3, shuffle=True), None, 4, rank, use_seedable_sampler=True, data_seed=7
        )
        for rank in range(4)
    ]
    # The shards are what the ranks of an ordinary run of four processes get.
    for epoch in range(2):
        for rank, loader in enumerate(ranks):
            for step, batch in enumerate(loader):
                assert batch[:, 0].tolist() == [row[0] for row in whole[epoch * 1000 + step, rank][0]]
    rounds = 2 * -(-steps // window)
    parts: dict[tuple[int, int], list[Any]] = {}
    for rank in range(2):
        parts.update(read(Hand(4, window, [(rank, 2, True)] * rounds), epochs=2))
    assert parts == whole
    changing = [(0, 3, True), (1, 3, False), (0, 1, True), (2, 4, False), (2, 4, False), (0, 1, True)]
    part = read(Hand(4, window, list(changing)), epochs=2)
    assert all(part[key] == whole[key] for key in part)
    assert {step for step, _ in part} == {step for step, _ in whole}
    assert read(Hand(4, window, [(4, 5, True)] * rounds), epochs=2) == {}


def test_workers_draw_the_same_numbers() -> None:
    one = read(Hand(2, 1, []), length=12)
    assert read(Hand(2, 1, [(0, 1, False)]), length=12, num_workers=2) == one


def test_state_continues_at_the_committed_step() -> None:
    hand = Hand(2, 1, [(0, 2, True), (0, 2, True), (0, 2, False)])
    loader = dealt(hand)
    seen = []
    for batch in loader:
        seen.append(batch[:, 0].tolist())
        if len(seen) == 3:
            break
    state = loader.state_dict()
    assert (state["epoch"], state["position"], state["num_processes"]) == (0, 12, 2)
    again = dealt(Hand(2, 1, [(0, 2, True)] * 20))
    again.load_state_dict(state)
    assert next(iter(again))[:, 0].tolist() == seen[2]
    # An ordinary run of two processes continues there too.
    plain = prepare_data_loader(
        DataLoader(Table(50), batch_size=3, shuffle=True), None, 2, 0, use_seedable_sampler=True, data_seed=7
    )
    plain.load_state_dict(state)
    assert next(iter(plain))[:, 0].tolist() == seen[2]
    with pytest.raises(
        ConfigurationError, match="after 12 samples of epoch 0, which is not a multiple of the 9 samples"
    ):
        dealt(Hand(3, 1, [])).load_state_dict(state)


def test_evaluation_reads_everything_on_every_replica() -> None:
    hand = Hand(4, 1, [])
    hand.is_training = False
    loader = dealt(hand)
    assert sorted(int(row[0]) for batch in loader for row in batch) == list(range(50))
    assert len(loader) == 17
    hand.is_training = True
    assert len(loader) == 5


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(10))


def test_what_cannot_be_dealt_is_refused() -> None:
    hand = Hand(2, 1, [])
    plain = prepare_data_loader(DataLoader(Table(10), batch_size=3), num_processes=1, process_index=0)
    with pytest.raises(ConfigurationError, match="even_batches=False leaves shards"):
        deal_steps(plain, hand, even_batches=False)
    stream = deal_steps(prepare_data_loader(DataLoader(Stream(), batch_size=3), None, 1, 0), hand)
    with pytest.raises(ConfigurationError, match="this loader has a Stream"):
        next(iter(stream))
    with pytest.raises(ConfigurationError, match=r"skip_first_batches\(loader, 1\)"):
        next(iter(dealt(hand).skipping(1)))
    assert DataLoaderConfiguration().even_batches


def test_seeds_differ() -> None:
    seeds = {unit_seed(s, e, t, j) for s in range(3) for e in range(10) for t in range(20) for j in range(4)}
    assert len(seeds) == 3 * 10 * 20 * 4 and all(0 <= seed < 2**63 for seed in seeds)

"""Steps that replicas share: their samples and random numbers do not depend on which replica computes them."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, WeightedRandomSampler

from accel_data import DataLoaderConfiguration, prepare_data_loader
from accel_data.replica_loader import ReplicaLoader, share_among_replicas
from accel_state.errors import ConfigurationError


class Table(Dataset[Any]):
    """Samples with their own index, and three random numbers that are drawn when they are read."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([index, torch.rand(()).item(), np.random.rand(), random.random()], dtype=torch.float64)


class Members:
    """Lets the ranks of a plan compute each attempt at a step, and commits as the plan says."""

    def __init__(self, num_shards: int, window: int, attempts: list[tuple[int, int, bool]]) -> None:
        self.num_shards, self.window, self.attempts = num_shards, window, attempts
        self.seed, self.is_training = 5, True

    def open_step(self, loader: ReplicaLoader) -> tuple[int, int]:
        rank, size, self.commits = self.attempts.pop(0) if self.attempts else (0, 1, True)
        return rank, size

    def end_step(self, loader: ReplicaLoader) -> None:
        if self.commits:
            loader.commit()


def shared(members: Members, length: int = 50, batch_size: int = 3, **settings: Any) -> ReplicaLoader:
    loader = DataLoader(Table(length), batch_size=batch_size, shuffle=True, **settings)
    prepared = prepare_data_loader(loader, num_processes=1, process_index=0, use_seedable_sampler=True, data_seed=7)
    return share_among_replicas(prepared, members)


def read(members: Members, epochs: int = 1, **settings: Any) -> dict[tuple[int, int], list[Any]]:
    """What each (batch of a committed step, shard) had, with a number drawn by the model."""
    loader, table, attempt = shared(members, **settings), {}, []
    for epoch in range(epochs):
        for batch in loader:
            shard = loader.logical_shard
            step = shard.position // loader.total_batch_size
            attempt.append(((epoch * 1000 + step, shard.index), [batch.tolist(), torch.rand(()).item()]))
            if shard.ends_step and members.commits:
                assert loader.end_of_dataloader == (step + 1 == len(loader))
                if shard.weight:
                    table.update(attempt)
            if shard.ends_step:
                attempt = []
    return table


@pytest.mark.parametrize("window", [1, 2])
def test_a_step_is_the_same_whoever_computes_it(window: int) -> None:
    """Two replicas, three, a step that is handed out again, and a spare agree with one that computes everything."""
    whole = read(Members(4, window, []), epochs=2)
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
        parts.update(read(Members(4, window, [(rank, 2, True)] * rounds), epochs=2))
    assert parts == whole
    changing = [(0, 3, True), (1, 3, False), (0, 1, True), (2, 4, False), (2, 4, False), (0, 1, True)]
    part = read(Members(4, window, list(changing)), epochs=2)
    assert all(part[key] == whole[key] for key in part)
    assert {step for step, _ in part} == {step for step, _ in whole}
    assert read(Members(4, window, [(4, 5, True)] * rounds), epochs=2) == {}


def test_workers_draw_the_same_numbers() -> None:
    one = read(Members(2, 1, []), length=12)
    assert read(Members(2, 1, [(0, 1, False)]), length=12, num_workers=2) == one


def test_state_continues_at_the_committed_step() -> None:
    members = Members(2, 1, [(0, 2, True), (0, 2, True), (0, 2, False)])
    loader = shared(members)
    seen = []
    for batch in loader:
        seen.append(batch[:, 0].tolist())
        if len(seen) == 3:
            break
    state = loader.state_dict()
    assert (state["epoch"], state["position"], state["num_processes"]) == (0, 12, 2)
    again = shared(Members(2, 1, [(0, 2, True)] * 20))
    again.load_state_dict(state)
    assert next(iter(again))[:, 0].tolist() == seen[2]
    # An ordinary run of two processes continues there too.
    plain = prepare_data_loader(
        DataLoader(Table(50), batch_size=3, shuffle=True), None, 2, 0, use_seedable_sampler=True, data_seed=7
    )
    plain.load_state_dict(state)
    assert next(iter(plain))[:, 0].tolist() == seen[2]
    with pytest.raises(ConfigurationError, match="after 12 samples.*epoch 0.*the 9 samples"):
        shared(Members(3, 1, [])).load_state_dict(state)


def test_evaluation_reads_everything_on_every_replica() -> None:
    members = Members(4, 1, [])
    members.is_training = False
    loader = shared(members)
    assert sorted(int(row[0]) for batch in loader for row in batch) == list(range(50))
    assert len(loader) == 17
    members.is_training = True
    assert len(loader) == 5


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(10))


def test_what_replicas_cannot_share() -> None:
    members = Members(2, 1, [])
    plain = prepare_data_loader(DataLoader(Table(10), batch_size=3), num_processes=1, process_index=0)
    with pytest.raises(ConfigurationError, match="even_batches=False"):
        share_among_replicas(plain, members, even_batches=False)
    with pytest.raises(ConfigurationError, match=r"skip_first_batches\(loader, 1\)"):
        next(iter(shared(members).skipping(1)))
    with pytest.raises(ConfigurationError, match="in_order=False"):
        shared(members, num_workers=1, in_order=False)
    # These are for evaluation only.
    weighted = WeightedRandomSampler(torch.ones(10), 10)
    for loader in (DataLoader(Stream(), batch_size=3), DataLoader(Table(10), batch_size=3, sampler=weighted)):
        prepared = prepare_data_loader(loader, num_processes=1, process_index=0)
        assert share_among_replicas(prepared, members) is prepared
    assert DataLoaderConfiguration().even_batches


def test_a_second_set_of_ranks_reads_ahead_again_with_persistent_workers() -> None:
    attempts = [(0, 2, True), (1, 2, False), (0, 1, True)]
    expected = read(Members(2, 1, list(attempts)), length=24)
    assert read(Members(2, 1, attempts), length=24, num_workers=1, persistent_workers=True) == expected

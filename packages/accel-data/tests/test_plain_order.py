"""The orders of plain PyTorch in one process, and agreement of the ranks in several."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from accel_data import prepare_data_loader
from accel_state.testing import run_world

DATA = torch.arange(11)


def build(kind: str, workers: int = 0) -> DataLoader[Any]:
    samplers: dict[str, Any] = {
        "shuffle": {"shuffle": True},
        "generator": {"shuffle": True, "generator": torch.Generator().manual_seed(5)},
        "replacement": {"sampler": RandomSampler(range(11), replacement=True)},
        "subset": {"sampler": SubsetRandomSampler(range(11))},
        "weighted": {"sampler": WeightedRandomSampler([1.0] * 11, 11)},
    }
    return DataLoader(DATA, batch_size=2, num_workers=workers, **samplers[kind])  # type: ignore[arg-type]


def three_epochs(loader: Any) -> list[Any]:
    record = []
    for _ in range(3):
        for batch in loader:
            record.append((batch.tolist(), torch.rand(()).item()))  # a loop draws too, for dropout
    return record


@pytest.mark.parametrize("kind", ["shuffle", "generator", "replacement", "subset", "weighted"])
@pytest.mark.parametrize("workers", [0, 1])
def test_all_epochs_have_the_order_of_plain_torch(kind: str, workers: int) -> None:
    torch.manual_seed(5)
    expected = three_epochs(build(kind, workers))
    torch.manual_seed(5)
    assert three_epochs(prepare_data_loader(build(kind, workers), num_processes=1, process_index=0)) == expected


def orders_of_a_rank() -> list[Any]:
    loaders = [prepare_data_loader(build(kind)) for kind in ("shuffle", "subset")]
    return [[x for batch in loader for x in batch.tolist()] for loader in loaders for _ in range(3)]


def test_ranks_agree_on_every_epoch() -> None:
    first, second = run_world(orders_of_a_rank, 2)
    for left, right in zip(first, second, strict=True):
        # 11 samples in steps of 2 ranks with 2 samples: one sample is repeated.
        assert set(left) | set(right) == set(range(11)) and len(left) + len(right) == 12


@pytest.mark.parametrize("kind", ["shuffle", "subset"])
@pytest.mark.parametrize("batches", [0, 2, 6])
def test_a_prepared_loader_can_be_pickled(kind: str, batches: int) -> None:
    loader = prepare_data_loader(build(kind), num_processes=1, process_index=0, put_on_device=False)
    iterator = iter(loader)
    for _ in range(batches):
        next(iterator)
    copied = pickle.loads(pickle.dumps(loader))
    assert type(copied) is type(loader) and len(copied) == len(loader)
    torch.manual_seed(1)
    expected = three_epochs(build(kind))
    torch.manual_seed(1)
    assert three_epochs(copied) == expected

"""The private names of torch that _torch_compat uses still exist and behave as expected."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, get_worker_info

from accel_data import _torch_compat
from accel_state.testing import run_world


def test_pin_memory_walks_nested_batches() -> None:
    class Custom:
        def pin_memory(self, device: Any = None) -> str:
            return "pinned"

    assert _torch_compat.pin_memory({"a": [Custom()], "b": 1}, None) == {"a": ["pinned"], "b": 1}


def test_persistent_workers_are_visible_and_can_be_stopped() -> None:
    loader = DataLoader(range(4), num_workers=1, persistent_workers=True)
    assert not _torch_compat.has_live_workers(loader)
    assert len(list(loader)) == 4
    assert _torch_compat.has_live_workers(loader)
    _torch_compat.stop_workers(loader)
    assert not _torch_compat.has_live_workers(loader)


def test_workers_of_a_running_iteration_can_be_shut_down() -> None:
    loader = DataLoader(range(4), num_workers=1, persistent_workers=True)
    batches: Any = iter(loader)
    _torch_compat.shut_down_at_exit(batches)
    (worker,) = batches._workers
    assert worker.is_alive()
    _torch_compat._shut_down()
    assert not worker.is_alive()


def test_guarded_attributes_of_a_loader_can_be_set() -> None:
    loader = DataLoader(range(4))
    with pytest.raises(ValueError, match="should not be set"):
        loader.sampler = [3, 1]
    _torch_compat.set_attribute(loader, "sampler", [3, 1])
    assert loader.sampler == [3, 1]


def change_identity(worker_id: int) -> None:
    info: Any = get_worker_info()
    with pytest.raises((RuntimeError, AttributeError)):
        info.id = 5
    _torch_compat.set_worker_identity(5, 99)
    assert (info.id, info.seed) == (5, 99)


def test_the_identity_of_a_worker_can_be_changed() -> None:
    assert torch.cat(list(DataLoader(range(2), num_workers=1, worker_init_fn=change_identity))).tolist() == [0, 1]


def without_worker_info(worker_id: int) -> None:
    assert get_worker_info() is not None
    with _torch_compat.hidden_worker_info():
        assert get_worker_info() is None
    assert get_worker_info().id == worker_id


def test_worker_information_can_be_hidden() -> None:
    assert torch.cat(list(DataLoader(range(2), num_workers=1, worker_init_fn=without_worker_info))).tolist() == [0, 1]


def _write_and_read() -> list[str]:
    rank = dist.get_rank()
    _torch_compat.default_store().set(f"accel/test/{rank}", str(rank))
    return [_torch_compat.default_store().get(f"accel/test/{other}").decode() for other in range(2)]


def test_the_default_store_is_shared_by_all_ranks() -> None:
    assert run_world(_write_and_read, 2) == [["0", "1"]] * 2

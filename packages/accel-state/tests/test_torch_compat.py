"""Every private name of torch that accel-state uses still exists."""

from __future__ import annotations

from datetime import timedelta

from accel_state import _torch_compat
from accel_state.testing import run_world


def _write_and_read() -> list[str]:
    import torch.distributed as dist

    store = _torch_compat.default_store()
    store.set(f"rank {dist.get_rank()}", "here")
    return [store.get(f"rank {rank}").decode() for rank in range(dist.get_world_size())]


def _groups() -> list[int]:
    import torch.distributed as dist

    before = len(_torch_compat.process_groups())
    dist.new_group()
    return [before, len(_torch_compat.process_groups())]


def test_process_groups_are_listed() -> None:
    assert run_world(_groups, 2) == [[1, 2]] * 2


def _connect() -> tuple[bytes, int, int]:
    import torch
    import torch.distributed as dist

    other = _torch_compat.connect_again(timedelta(seconds=30))
    assert other is not None
    other.set(f"other {dist.get_rank()}", "here")
    before = _torch_compat.collectives_issued()
    dist.all_reduce(torch.ones(3))
    return other.get(f"other {1 - dist.get_rank()}"), before, _torch_compat.collectives_issued()


def test_a_second_connection_to_the_store_and_the_count_of_collectives() -> None:
    for text, before, after in run_world(_connect, 2):
        assert (text, after - before) == (b"here", 1)


def test_the_default_store_is_shared_by_all_ranks() -> None:
    assert run_world(_write_and_read, 2) == [["here", "here"]] * 2

"""Fails when torch drops a private name that accel_plan uses."""

from __future__ import annotations

import inspect

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.multiprocessing.reductions import StorageWeakRef

from accel_plan import _torch_compat as compat
from accel_plan.record import Recorder
from accel_plan.world import simulated_rank


@pytest.fixture
def two_ranks():
    with simulated_rank(0, 2, 2, {}):
        yield


def test_collectives_on_tensors_without_values(two_ranks) -> None:
    with compat.FakeTensorMode():
        tensor = torch.zeros(3)
        if compat.has_meta_collectives():
            dist.broadcast(tensor, 0)
        else:
            with pytest.raises(Exception, match="broadcast"):
                dist.broadcast(tensor, 0)


def test_storages() -> None:
    tensor = torch.zeros(8)
    view, other = tensor[2:], torch.zeros(8)
    assert compat.storage_id(view) == compat.storage_id(tensor) != compat.storage_id(other)
    reference = StorageWeakRef(tensor.untyped_storage())
    assert compat.live_bytes(reference) == 32
    del tensor, view
    assert compat.live_bytes(reference) == 0


def test_fake_tensors() -> None:
    with compat.FakeTensorMode(allow_non_fake_inputs=True):
        tensor = torch.zeros(4)
        assert isinstance(tensor, compat.FakeTensor)
        with compat.unset_fake_temporarily():
            assert not isinstance(torch.zeros(1), compat.FakeTensor)


def test_collectives_and_their_groups(two_ranks: None) -> None:
    tensor = torch.zeros(4)
    assert compat.local_tensor(DTensor.from_local(tensor, init_device_mesh("cpu", (2,)), [Replicate()])) is not None
    with Recorder({"dp_shard": 2}) as recorder:
        dist.all_reduce(tensor)
        result = torch.ops._c10d_functional.all_reduce(tensor, "sum", dist.group.WORLD.group_name)
        torch.ops._c10d_functional.wait_tensor(result)
    assert [(item.kind, item.axis, item.calls, item.sent) for item in recorder.traffic] == [
        ("all-reduce", "dp_shard", 2, 32)
    ]


@pytest.mark.skipif(not hasattr(torch.cpu.Stream, "record_event"), reason="torch 2.6 has no FSDP 2 on CPUs")
def test_units_of_fsdp(two_ranks: None) -> None:
    model = fully_shard(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (2,)))
    (unit,) = compat.fsdp2_units(model)
    assert sum(map(compat.fsdp2_unsharded_bytes, unit)) == 4 * 20
    model.unshard()
    assert [tensor.numel() for parameter in unit for tensor in compat.fsdp2_unsharded_tensors(parameter)] == [16, 4]
    flat = FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu"))
    assert compat.fsdp1_unit_bytes(flat) == 4 * 20


def test_overridden_methods_of_pipeline_stages() -> None:
    parent = compat.local_pipeline_stage().__mro__[1]
    from torch.distributed.pipelining import schedules

    names = ["forward_one_chunk", "backward_one_chunk"]
    called = inspect.getsource(schedules)
    if "_get_init_p2p_neighbors_ops" in called:  # newer than torch 2.6
        names.append("_get_init_p2p_neighbors_ops")
    if "_warmup_p2p" in called:
        names += ["_warmup_forward_vote", "_warmup_backward_result"]
    assert [name for name in names if not callable(getattr(parent, name, None))] == []

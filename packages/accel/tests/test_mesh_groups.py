"""Meshes that are built before anything else of accel: on torch's fake process group, and on none at all."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from accel import Accelerator, ParallelismConfig
from accel_state import PartialState
from accel_state.errors import ConfigurationError
from accel_state.testing import run_world


def test_a_mesh_of_eight_ranks_on_the_fake_process_group() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=8)
    try:
        config = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2, tp_size=2)
        mesh = config.build_device_mesh("cpu")
        assert mesh is not None and mesh.device_type == "cpu" and config.get_device_mesh() is mesh
        assert mesh.mesh_dim_names == ("dp_replicate", "dp_shard", "tp")
        assert mesh.mesh.tolist() == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]] and tuple(mesh.get_coordinate()) == (1, 0, 1)
        assert mesh["dp_replicate", "dp_shard"].size() == 4
        with pytest.raises(ConfigurationError, match="there are 8 processes"):
            ParallelismConfig(tp_size=4).build_device_mesh("cpu")
        assert not PartialState._shared_state
    finally:
        dist.destroy_process_group()


def first_a_mesh() -> dict[str, Any]:
    assert not dist.is_initialized() and not PartialState._shared_state
    config = ParallelismConfig(tp_size=2)
    mesh = config.get_device_mesh("cpu")
    assert mesh is not None
    accelerator = Accelerator(cpu=True, parallelism_config=config)
    assert accelerator.torch_device_mesh is mesh
    return {"backend": dist.get_backend(), "size": mesh.size(), "rank": mesh["tp"].get_local_rank()}


def test_a_mesh_creates_the_process_group_of_the_launcher() -> None:
    found = run_world(first_a_mesh, 2, state=False, timeout=60)
    assert found == [{"backend": "gloo", "size": 2, "rank": rank} for rank in range(2)]

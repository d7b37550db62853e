"""Checkpoints in models whose parameters are sharded over ranks."""

from __future__ import annotations

from pathlib import Path

import torch
from bigmodel_nets import save
from torch import nn

from accel_bigmodel import load_checkpoint_in_model
from accel_state.testing import run_world


def build(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))


def load_on_rank(file: str, broadcast: bool) -> list[list[float]]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    model = build(1)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    load_checkpoint_in_model(model, file, broadcast_from_rank0=broadcast, strict=True)
    return [parameter.full_tensor().flatten().tolist() for parameter in model.parameters()]


def test_every_rank_gets_its_shards(tmp_path: Path) -> None:
    model = build(0)
    file = save(model, tmp_path / "model.safetensors")
    expected = [parameter.flatten().tolist() for parameter in model.parameters()]
    for broadcast in (False, True):
        for found in run_world(load_on_rank, 2, str(file), broadcast):
            assert found == expected, broadcast

"""States, weights and merged weights in object storage, on an S3 server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from s3_server import keys, s3_server, uploads
from torch import nn

from accel import Accelerator, FullyShardedDataParallelPlugin, ProjectConfiguration, load_checkpoint_and_dispatch
from accel.fsdp.merge import merge_fsdp_weights
from accel_checkpoint import CheckpointError, list_checkpoints
from accel_state.errors import ConfigurationError
from accel_state.testing import run_world

URL = "s3://bucket/run"


@pytest.fixture(scope="module", autouse=True)
def server() -> Iterator[None]:
    with s3_server():
        yield


def trained(project: ProjectConfiguration, steps: int, **options: Any) -> tuple[Accelerator, Any, Any]:
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, project_config=project, **options)
    model = nn.Sequential(nn.Linear(30, 20), nn.Linear(20, 3))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    for _ in range(steps):
        step(accelerator, model, optimizer)
    return accelerator, model, optimizer


def step(accelerator: Accelerator, model: Any, optimizer: Any) -> None:
    accelerator.backward(model(torch.randn(4, 30)).square().mean())
    optimizer.step()
    optimizer.zero_grad()


def numbered() -> ProjectConfiguration:
    return ProjectConfiguration(URL, automatic_checkpoint_naming=True, total_limit=2)


def sharded() -> list[float]:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
    accelerator, model, optimizer = trained(numbered(), 1, fsdp_plugin=plugin)
    for number in range(3):
        saved = accelerator.save_state(blocking=number != 1)
    assert str(saved) == f"{URL}/checkpoints/checkpoint_2"
    accelerator.wait_for_save()
    step(accelerator, model, optimizer)
    expected = model[0].weight.full_tensor().clone()
    accelerator.load_state("latest")
    step(accelerator, model, optimizer)
    assert torch.equal(model[0].weight.full_tensor(), expected)
    accelerator.load_state()
    return model[0].weight.full_tensor().flatten().tolist()


def test_sharded_states_with_automatic_names(tmp_path: Path) -> None:
    weights = run_world(sharded, 2, timeout=150)
    assert weights[0] == weights[1]
    assert [info.path.name for info in list_checkpoints(URL) if info.complete] == ["checkpoint_1", "checkpoint_2"]
    assert not uploads() and not [key for key in keys("run/") if ".owner" in key or ".records" in key]
    # In one process, of which a new run resumes.
    accelerator, model, _ = trained(numbered(), 0)
    assert accelerator.resume() and model[0].weight.flatten().tolist() == weights[0]
    assert accelerator.project_configuration.iteration == 3
    # Merged, from the store into the store.
    assert merge_fsdp_weights(f"{URL}/checkpoints/checkpoint_2", "s3://bucket/merged") == ["model.safetensors"]
    assert merge_fsdp_weights(f"{URL}/checkpoints/checkpoint_2/pytorch_model_fsdp_0", tmp_path) == ["model.safetensors"]
    loaded = nn.Sequential(nn.Linear(30, 20), nn.Linear(20, 3))
    load_checkpoint_and_dispatch(loaded, "s3://bucket/merged")
    assert loaded[0].weight.flatten().tolist() == weights[0] and (tmp_path / "model.safetensors").is_file()
    with pytest.raises(ConfigurationError, match="remove_checkpoint_dir"):
        merge_fsdp_weights(f"{URL}/checkpoints/checkpoint_2", tmp_path, remove_checkpoint_dir=True)


def test_states_and_weights_of_one_process(tmp_path: Path) -> None:
    accelerator, model, optimizer = trained(ProjectConfiguration(), 2)
    accelerator.save_state("s3://bucket/state")
    step(accelerator, model, optimizer)
    expected = model[0].weight.clone()
    accelerator.load_state("s3://bucket/state")
    step(accelerator, model, optimizer)
    assert torch.equal(model[0].weight, expected)
    loaded = nn.Sequential(nn.Linear(30, 20), nn.Linear(20, 3))
    load_checkpoint_and_dispatch(loaded, "s3://bucket/state")  # its model.safetensors
    assert not torch.equal(loaded[0].weight, expected)
    accelerator.save_model(model, "s3://bucket/weights", max_shard_size="1KB")
    assert "model.safetensors.index.json" in keys("weights/")
    load_checkpoint_and_dispatch(loaded, "s3://bucket/weights")
    assert torch.equal(loaded[0].weight, expected)
    accelerator.save_model(model, "s3://bucket/weights")
    assert keys("weights/") == ["model.safetensors"]  # none of the save before it


def test_what_is_not_there() -> None:
    accelerator, _, _ = trained(numbered(), 0)
    with pytest.raises(CheckpointError, match="s3://bucket/nowhere"):
        accelerator.load_state("s3://bucket/nowhere")
    other, _, _ = trained(ProjectConfiguration("s3://bucket/empty", automatic_checkpoint_naming=True), 0)
    assert not other.resume()
    with pytest.raises(ConfigurationError, match="s3://bucket/empty/checkpoints"):
        other.load_state()


def test_nodes_that_save_on_their_own() -> None:
    accelerator, _, _ = trained(ProjectConfiguration(save_on_each_node=True), 0)
    with pytest.raises(ConfigurationError, match="save_on_each_node"):
        accelerator.save_state("s3://bucket/nodes")

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
from accel_state.storage.url import RemotePath
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
    from_index = nn.Sequential(nn.Linear(30, 20), nn.Linear(20, 3))
    load_checkpoint_and_dispatch(from_index, "s3://bucket/weights/model.safetensors.index.json")
    assert torch.equal(from_index[0].weight, expected) and torch.equal(from_index[1].bias, loaded[1].bias)
    accelerator.save_model(model, "s3://bucket/weights")
    assert keys("weights/") == ["model.safetensors"]  # none of the save before it
    on_disk = nn.Sequential(nn.Linear(30, 20), nn.Linear(20, 3))
    load_checkpoint_and_dispatch(on_disk, "s3://bucket/weights/model.safetensors", device_map={"0": "cpu", "1": "disk"})
    batch = torch.ones(2, 30)
    assert torch.equal(on_disk(batch), loaded(batch))
    with pytest.raises(ConfigurationError, match=r"s3://bucket/weights lacks \['other.safetensors'\]"):
        load_checkpoint_and_dispatch(on_disk, "s3://bucket/weights/other.safetensors")


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


COPIED = "s3://bucket/copied"


def naming(folder: Any, **settings: Any) -> ProjectConfiguration:
    return ProjectConfiguration(str(folder), automatic_checkpoint_naming=True, **settings)


def copying(folder: str) -> ProjectConfiguration:
    return naming(folder, total_limit=2, upload_to=COPIED)


def copied(folder: str, is_sharded: bool) -> tuple[list[float], list[float]]:
    """The weights of the last state and those of a step later."""
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
    accelerator, model, optimizer = trained(copying(folder), 1, **({"fsdp_plugin": plugin} if is_sharded else {}))
    for number in range(4):
        step(accelerator, model, optimizer)
        saved = accelerator.save_state(blocking=number != 1)
    assert saved == Path(folder, "checkpoints", "checkpoint_3")
    accelerator.wait_for_uploads()
    last = flat(model)
    step(accelerator, model, optimizer)
    result = last, flat(model)
    accelerator.end_training()
    return result


def flat(model: Any) -> list[float]:
    weight = next(model.parameters())
    return list((weight.full_tensor() if hasattr(weight, "full_tensor") else weight).flatten().tolist())


# Each uploading process takes seconds to start; sharded states are uploaded by both ranks.
@pytest.mark.parametrize("is_sharded", [pytest.param(False, marks=pytest.mark.slow), True], ids=["ddp", "fsdp2"])
def test_states_of_a_directory_and_their_copies(tmp_path: Path, is_sharded: bool) -> None:
    folder = str(tmp_path / "run")
    (last, after), _ = run_world(copied, 2, folder, is_sharded, timeout=150)
    kept = ["checkpoint_2", "checkpoint_3"]
    for place in (folder, COPIED):
        assert [info.path.name for info in list_checkpoints(place) if info.complete] == kept
    # A new run takes the state of the directory, and one on another machine that of the store.
    for directory, is_here in ((folder, True), (str(tmp_path / "other"), False)):
        accelerator, model, optimizer = trained(copying(directory), 0)
        found = accelerator._checkpointer.newest(None)
        assert found == (Path(folder) if is_here else RemotePath(COPIED)) / "checkpoints" / "checkpoint_3"
        assert accelerator.resume() and flat(model) == last
        step(accelerator, model, optimizer)
        assert flat(model) == pytest.approx(after, rel=1e-5)
        accelerator.end_training()


@pytest.mark.slow  # four processes that upload, 18 s; the copies of two ranks have a fast test
def test_a_run_that_comes_back_from_another_machine(tmp_path: Path) -> None:
    """What only this machine has, and the run did not go on from, is replaced."""
    here, there = str(tmp_path / "here"), str(tmp_path / "there")
    place = "s3://bucket/back"
    accelerator, model, optimizer = trained(naming(here, upload_to=place), 1)
    accelerator.save_state()
    accelerator.wait_for_uploads()
    accelerator.project_configuration.upload_to = None
    for _ in range(2):
        step(accelerator, model, optimizer)
        accelerator.save_state()  # the machine is lost before these are uploaded
    # The run goes on elsewhere.
    other, other_model, other_optimizer = trained(naming(there, upload_to=place), 0)
    assert other.resume() and other.project_configuration.iteration == 1
    for _ in range(3):
        step(other, other_model, other_optimizer)
    other.save_state()
    other.end_training()
    expected = flat(other_model)
    # And comes back.
    accelerator, model, _ = trained(naming(here, upload_to=place), 0)
    assert accelerator.resume() and flat(model) == expected
    assert accelerator.save_state() == Path(here, "checkpoints", "checkpoint_2")  # the directory had one of this name
    accelerator.end_training()
    names = [info.path.name for info in list_checkpoints(place)]
    assert names == ["checkpoint_0", "checkpoint_1", "checkpoint_2"]
    again, model, _ = trained(naming(here, upload_to=place), 0)
    assert again.resume() and flat(model) == expected
    again.end_training()


@pytest.mark.slow  # two processes that upload; the copies of two ranks are fast
def test_an_older_state_that_is_loaded_is_not_uploaded_again(tmp_path: Path) -> None:
    place = "s3://bucket/older"
    accelerator, _, _ = trained(naming(tmp_path, upload_to=place), 1)
    first = accelerator.save_state()
    accelerator.save_state()
    accelerator.end_training()
    accelerator, _, _ = trained(naming(tmp_path, upload_to=place, total_limit=1), 0)
    accelerator.load_state(first)  # for an evaluation, for example
    accelerator.end_training()
    assert [info.path.name for info in list_checkpoints(place)] == ["checkpoint_0", "checkpoint_1"]


@pytest.mark.slow  # two processes that upload, 7 s; the copies of two ranks have a fast test
def test_a_state_whose_upload_was_cut_off_is_uploaded_by_the_next_run(tmp_path: Path) -> None:
    place = "s3://bucket/cut"
    accelerator, _, _ = trained(naming(tmp_path), 1)
    accelerator.save_state()
    accelerator, _, _ = trained(naming(tmp_path, upload_to=place), 0)
    assert accelerator.resume()
    accelerator.end_training()
    assert [info.path.name for info in list_checkpoints(place) if info.complete] == ["checkpoint_0"]


@pytest.mark.slow  # two processes that upload; the copies of two ranks are fast
def test_named_states_and_their_copies(tmp_path: Path) -> None:
    project = ProjectConfiguration(str(tmp_path / "run"), upload_to="s3://bucket/named")
    accelerator, model, optimizer = trained(project, 1)
    accelerator.save_state(str(tmp_path / "run" / "epochs" / "first"))
    step(accelerator, model, optimizer)
    accelerator.save_state(str(tmp_path / "outside"))
    expected = flat(model)
    accelerator.save_state("s3://bucket/elsewhere")
    accelerator.end_training()
    manifests = [key for key in keys("named/") if key.endswith("manifest.json")]
    assert manifests == ["epochs/first/accel_manifest.json", "outside/accel_manifest.json"]
    new, model, _ = trained(ProjectConfiguration(str(tmp_path / "new"), upload_to="s3://bucket/named"), 0)
    assert new.resume() and flat(model) == expected  # the one that was saved last
    new.end_training()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"upload_to": "runs/copies"}, "URL of a store"),
        ({"project_dir": "s3://bucket/x", "upload_to": COPIED}, "is a store already"),
        ({"project_dir": "x", "upload_to": COPIED, "save_on_each_node": True}, "save_on_each_node"),
        ({"pack_rank_files": True, "save_on_each_node": True}, "save_on_each_node"),
        ({"pack_rank_files": "no"}, "must be True, False or None"),
    ],
)
def test_copies_that_cannot_be_made(options: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        ProjectConfiguration(**options)

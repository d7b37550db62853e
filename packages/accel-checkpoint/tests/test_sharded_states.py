"""States with sharded tensors: bit for bit the values of one process, on any number of ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from s3_server import keys, s3_server
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from accel_checkpoint import AsyncSaver, CheckpointError, load, save, verify
from accel_state import PartialState
from accel_state.errors import ConfigurationError
from accel_state.testing import run_world

NO_FSDP2 = pytest.mark.skipif(not hasattr(torch.cpu.Stream, "record_event"), reason="torch 2.6 has no FSDP 2 on CPUs")


class Net(nn.Module):
    """Five rows: uneven on two and four ranks. The buffer is not sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 5), nn.Linear(5, 1)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return self.second(self.first(inputs).tanh())


def built(seed: int) -> dict[str, Any]:
    """The model, sharded where there are several ranks, and its optimizer without a state."""
    torch.manual_seed(seed)
    model = Net()
    if PartialState().num_processes > 1:
        fully_shard(model, mesh=init_device_mesh("cpu", (PartialState().num_processes,)))
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.1)}


def train(state: dict[str, Any], steps: int) -> None:
    """All ranks have the same data, so that the average of their gradients is the gradient of one process."""
    for _ in range(steps):
        torch.manual_seed(7)
        state["model"](torch.randn(8, 3)).square().mean().backward()
        state["optimizer"].step()
        state["optimizer"].zero_grad()


def full(state: dict[str, Any]) -> list[torch.Tensor]:
    """Everything that training changes, whole."""
    entries = state["optimizer"].state_dict()["state"].values()
    values = [*state["model"].state_dict().values(), *(value for entry in entries for value in entry.values())]
    return [value.full_tensor() if isinstance(value, DTensor) else value.clone() for value in values]


def write(folder: str, in_background: bool) -> None:
    state = {**built(0), "epoch": 3}
    train(state, 2)
    if not in_background:
        save(state, folder)
        return
    with AsyncSaver() as saver:
        saver.save(state, folder)
        for value in state["model"].state_dict().values():
            value.zero_()


def resumed(folder: str) -> list[torch.Tensor]:
    state = built(1)
    assert load(folder, state) == {"epoch": 3}
    loaded = full(state)
    train(state, 1)
    return [*loaded, *full(state)]


@pytest.fixture(scope="module")
def expected() -> list[torch.Tensor]:
    """What one process has after two steps, and after three."""
    state = built(0)
    train(state, 2)
    two = full(state)
    train(state, 1)
    return [*two, *full(state)]


@NO_FSDP2
@pytest.mark.parametrize(
    ("ranks", "in_background", "readers"), [(1, False, [4]), (2, True, [2]), (2, False, [1, 4]), (4, False, [2])]
)
def test_any_number_of_ranks_continues_bit_for_bit(
    tmp_path: Path, expected: list[torch.Tensor], ranks: int, in_background: bool, readers: list[int]
) -> None:
    place = tmp_path / "state"
    run_world(write, ranks, str(place), in_background)
    assert verify(place) == {} and os.listdir(tmp_path) == ["state"]
    shards = [f"__{rank}_0.distcp" for rank in range(ranks)] if ranks > 1 else []
    assert sorted(path.name for path in place.glob("model/__*")) == shards
    for count in readers:
        for found in run_world(resumed, count, str(place)):
            assert len(found) == len(expected) and all(map(torch.equal, found, expected)), count


@NO_FSDP2
@pytest.mark.slow  # a server and two ranks
def test_in_a_store(expected: list[torch.Tensor]) -> None:
    """Each rank sends its own parts, and any number of ranks reads them."""
    place = "s3://bucket/state"
    with s3_server():
        for in_background in (False, True):
            run_world(write, 2, place, in_background)
            assert verify(place) == {}
            sharded = {key.rpartition("/model/")[2] for key in keys("state/") if "/model/" in key}
            assert sharded == {".metadata", "__0_0.distcp", "__1_0.distcp"}
            for found in [*run_world(resumed, 2, place), resumed(place)]:
                assert len(found) == len(expected) and all(map(torch.equal, found, expected))


def layouts(folder: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    full = torch.arange(30.0).reshape(5, 6)
    tensors = [distribute_tensor(full, mesh, place) for place in ([Shard(0), Shard(1)], [Replicate(), Shard(1)])]
    state = {"nested": {"a.b": tensors[0], "a": {"b": [tensors[1], 1]}}, "plain": full, "one": tensors[1]}
    save(state, folder)
    values = load(folder)
    assert torch.equal(values["nested"]["a.b"], full) and torch.equal(values["one"], full)
    assert torch.equal(values["nested"]["a"]["b"][0], full) and values["nested"]["a"]["b"][1] == 1


def test_any_layout_and_names_with_dots(tmp_path: Path) -> None:
    run_world(layouts, 4, str(tmp_path / "state"))
    assert torch.equal(load(tmp_path / "state")["nested"]["a.b"], torch.arange(30.0).reshape(5, 6))


def refused(folder: str) -> list[str]:
    rank = PartialState().process_index
    mesh = init_device_mesh("cpu", (2,))
    tensor = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
    partial = DTensor.from_local(torch.ones(4), mesh, [Partial()])
    errors = []
    for state, per_rank in (
        ({"part": {"weight": tensor}}, ["part"]),
        ({"part": {f"weight{rank}": tensor}}, []),
        ({"part": {"weight": tensor if rank else 1}}, []),
        ({"part": {"weight": partial}}, []),
    ):
        with pytest.raises((ConfigurationError, CheckpointError)) as caught:
            save(state, Path(folder, "state"), per_rank=per_rank)
        errors.append(str(caught.value))
    return errors


def test_what_cannot_be_written_is_refused_on_all_ranks(tmp_path: Path) -> None:
    for errors in run_world(refused, 2, str(tmp_path)):
        assert "per_rank" in errors[0] and "different names" in errors[1] and "different names" in errors[2]
        assert "unreduced parts" in errors[3]
    assert os.listdir(tmp_path) == []

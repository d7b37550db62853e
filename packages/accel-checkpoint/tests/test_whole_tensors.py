"""Sharded states as whole tensors in safetensors files: on any number of ranks, and in the hands of other libraries."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn
from torch.distributed import checkpoint as distributed_checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from accel_checkpoint.sharded import whole_tensors
from accel_checkpoint.sharded.reader import read_shards, tensors_in
from accel_checkpoint.sharded.sources import MappedFiles, Range
from accel_checkpoint.sharded.whole_tensors import INDEX_NAME, whole_state
from accel_checkpoint.writer import write_parts
from accel_state import PartialState
from accel_state.errors import ConfigurationError
from accel_state.testing import run_world


def full_tensors() -> dict[str, torch.Tensor]:
    """Shapes that ranks do not divide evenly, and dtypes of all widths."""
    return {
        "rows": torch.arange(7 * 5.0).view(7, 5),
        "columns": torch.arange(4 * 6, dtype=torch.bfloat16).view(4, 6),
        "one": torch.tensor([3.5], dtype=torch.float64),
        "flags": torch.tensor([True, False, True]),
        "copied": torch.arange(9, dtype=torch.int16),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 4),
        "large": torch.arange(400 * 300.0).view(400, 300),
    }


def placements(world: int) -> tuple[Any, dict[str, list[Any]]]:
    """Of four ranks two and two: a mesh of two axes, and how the tensors lie on it that ranks do not have in full."""
    mesh = init_device_mesh("cpu", (world // 2, 2) if world > 2 else (1, world))
    kinds: dict[str, list[Any]] = {name: [Replicate(), Shard(0)] for name in ("rows", "one", "empty", "large")}
    return mesh, {**kinds, "columns": [Shard(0), Shard(1)]}


def state_on(world: int, only: int | None = None) -> dict[str, Any]:
    mesh, kinds = placements(world)
    state: dict[str, Any] = {}
    for name, value in full_tensors().items():
        state[name] = distribute_tensor(value, mesh, kinds[name]) if name in kinds else value
    state["version"] = {"of": "a value"}
    if only is not None and PartialState().process_index == only:
        state["mine"] = torch.full((6,), float(only))  # as a stage of a pipeline has it
    return state


def saved(folder: str, only: int | None = None, group_bytes: int = 64) -> list[str]:
    whole_tensors._GROUP_BYTES = group_bytes
    process = PartialState()
    (Path(folder) / "m").mkdir(parents=True, exist_ok=True)
    process.collectives.barrier()
    for _ in range(2):  # the second time with known metadata
        parts, finish = whole_state({"model": state_on(process.num_processes, only)}, "m", process.collectives)
        written = write_parts(Path(folder), parts)
        process.collectives.barrier()
        if process.is_main_process:
            finish(Path(folder))
        process.collectives.barrier()
    return sorted(written)


def loaded(folder: str) -> dict[str, Any]:
    world = PartialState().num_processes
    mesh, kinds = placements(world)
    like = {name: distribute_tensor(torch.zeros_like(full_tensors()[name]), mesh, kinds[name]) for name in kinds}

    def memory(path: tuple[Any, ...], size: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        found = like.get(path[0])
        return torch.zeros(size, dtype=dtype) if found is None else found

    state = read_shards(Path(folder, "m"), memory, "model")
    return {
        name: value.full_tensor() if isinstance(value, DTensor) else value
        for name, value in state.items()
    }  # fmt: skip


def whole(folder: Path) -> dict[str, torch.Tensor]:
    """What the index says is in the files, with the file of each."""
    index = json.loads((folder / INDEX_NAME).read_text())
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        content = load_file(file)
        assert {name for name, place in index["weight_map"].items() if place == file.name} == set(content)
        tensors |= content
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    return tensors


def assert_equal(found: dict[str, Any], expected: dict[str, torch.Tensor]) -> None:
    for name, value in expected.items():
        assert found[name].dtype == value.dtype and torch.equal(found[name], value), name


def test_files_hold_whole_tensors_which_load_on_any_number_of_ranks(tmp_path: Path) -> None:
    files = run_world(saved, 4, str(tmp_path), 2)
    names = [f"m/model-{number:05d}-of-00004.safetensors" for number in (1, 2, 3, 4)]
    assert files == [["m/__0_0.distcp", names[0]], *([name] for name in names[1:])]
    expected = {**full_tensors(), "mine": torch.full((6,), 2.0)}
    found = whole(tmp_path / "m")
    assert set(found) == set(expected)
    assert_equal(found, expected)
    with safe_open(tmp_path / names[0], "pt") as file:
        assert file.metadata() == {"format": "pt"}
    for world in (1, 2, 4):
        for state in run_world(loaded, world, str(tmp_path)):
            assert_equal(state, expected)
            assert state["version"] == {"of": "a value"}
    assert tensors_in(tmp_path / "m", "model")["rows"].shape == (7, 5)


def torchs_reader(folder: str) -> dict[str, Any]:
    state = {name: torch.zeros_like(value) for name, value in full_tensors().items() if value.numel()}
    distributed_checkpoint.load(state, storage_reader=distributed_checkpoint.HuggingFaceStorageReader(f"{folder}/m"))
    return state


@pytest.mark.skipif(
    not hasattr(distributed_checkpoint, "HuggingFaceStorageReader"), reason="this torch reads no safetensors files"
)
def test_torchs_reader_of_safetensors_reads_them(tmp_path: Path) -> None:
    run_world(saved, 2, str(tmp_path), None, 1 << 28)
    expected = {name: value for name, value in full_tensors().items() if value.numel()}
    for state in run_world(torchs_reader, 2, str(tmp_path)):
        assert_equal(state, expected)


class Counting(MappedFiles):
    """Counts the bytes that are asked for."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.count = 0

    def fetch(self, ranges: Any) -> None:
        found: list[Range] = list(ranges)
        self.count += sum(end - begin for _, begin, end in found)


def test_a_part_is_read_without_the_rest(tmp_path: Path) -> None:
    run_world(saved, 2, str(tmp_path))
    source = Counting(tmp_path / "m")
    full = full_tensors()["large"]

    def like(path: tuple[Any, ...], size: torch.Size, dtype: torch.dtype) -> torch.Tensor | None:
        return torch.empty(size, dtype=dtype) if path == ("large",) else None

    assert torch.equal(read_shards(tmp_path / "m", like, "model", source)["large"], full)
    values = 200  # bytes that the value which is not a tensor may take
    assert full.nbytes <= source.count <= full.nbytes + 10 * values
    for count, chosen in run_world(part_read, 4, str(tmp_path)):
        assert chosen and full.nbytes / 4 <= count <= full.nbytes / 4 * 1.05 + 10 * values


def part_read(folder: str) -> tuple[int, bool]:
    process, full = PartialState(), full_tensors()["large"]
    mesh = init_device_mesh("cpu", (4,))
    target = distribute_tensor(torch.zeros_like(full), mesh, [Shard(0)])
    source = Counting(Path(folder, "m"))
    read_shards(Path(folder, "m"), lambda path, *_: target if path == ("large",) else None, "model", source)
    rank = process.process_index
    return source.count, torch.equal(target.to_local(), full[rank * 100 : rank * 100 + 100])


def test_a_damaged_length_and_a_dtype_that_the_format_lacks(tmp_path: Path) -> None:
    collectives = PartialState().collectives
    with pytest.raises(ConfigurationError, match=r"phase has dtype torch\.complex128"):
        whole_state({"model": {"phase": torch.zeros(2, dtype=torch.complex128)}}, "m", collectives)
    model = nn.Linear(200, 200)
    parts, finish = whole_state({"model": model.state_dict()}, "m", collectives)
    write_parts(tmp_path, parts)
    finish(tmp_path)
    state = read_shards(tmp_path / "m", lambda path, size, dtype: torch.empty(size, dtype=dtype), "model")
    assert_equal(state, dict(model.state_dict()))

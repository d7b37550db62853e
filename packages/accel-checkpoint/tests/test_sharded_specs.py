"""Ranks plan a sharded save alone: what they find out is what torch's planner makes of the plans of all ranks."""

from __future__ import annotations

import io
import random
import re
import struct
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from accel_checkpoint.names import CheckpointError
from accel_checkpoint.sharded import archive, reader
from accel_checkpoint.sharded import writer as sharded_writer
from accel_checkpoint.sharded.metadata import read_metadata
from accel_checkpoint.sharded.reader import read_shards
from accel_checkpoint.sharded.sources import MappedFiles
from accel_checkpoint.sharded.specs import regions, spread
from accel_checkpoint.sharded.writer import shard_state
from accel_checkpoint.writer import write_parts
from accel_state import PartialState
from accel_state.testing import run_world

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.distributed is disabled")


class Counted:
    """Collectives that count the bytes that this rank gives them."""

    def __init__(self, inner: Any) -> None:
        self._inner, self.sent, self.calls = inner, 0, 0
        self.rank, self.world_size = inner.rank, inner.world_size

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._inner, name)

        def call(value: Any, *args: Any) -> Any:
            self.calls += 1
            self.sent += (
                value.nbytes if isinstance(value, torch.Tensor) else len(torch.serialization.pickle.dumps(value))
            )
            return function(value, *args)

        return call


class Odd(nn.Module):
    """Sizes that no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(10, 7), nn.Linear(7, 5, bias=False), nn.Linear(5, 3)
        self.register_buffer("count", torch.arange(5.0))
        self.low = nn.Parameter(torch.randn(6, 4))
        self.register_buffer("none", torch.empty(0, 3))


def odd_state(mesh: Any, placements: dict[int, list[Any]]) -> dict[str, Any]:
    """A state of DTensors, plain tensors and values; placements by the number of dimensions."""
    torch.manual_seed(0)
    model = Odd()
    state: dict[str, Any] = {}
    for name, value in model.state_dict().items():
        if name == "count":
            state[name] = value
        else:
            state[name] = distribute_tensor(value, mesh, placements[value.ndim])
    moments = {name: {"step": torch.tensor(3.0), "exp_avg": value * 2} for name, value in state.items()}
    groups = [{"lr": 0.1, "params": list(state), "betas": (0.9, 0.99)}]
    return {"model": state, "optimizer": {"state": moments, "param_groups": groups}, "step": 3}


def layouts(kind: str, world: int) -> tuple[Any, dict[int, list[Any]]]:
    if kind == "fsdp":
        return init_device_mesh("cpu", (world,)), {1: [Shard(0)], 2: [Shard(0)]}
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("first", "second"))
    if kind == "hsdp":
        return mesh, {1: [Replicate(), Shard(0)], 2: [Replicate(), Shard(0)]}
    return mesh, {1: [Shard(0), Replicate()], 2: [Shard(0), Shard(1)]}


def comparable(metadata: Metadata) -> dict[str, Any]:
    result = {}
    for name, saved in metadata.state_dict_metadata.items():
        # torch keeps parts without elements, which no reader needs.
        chunks = {(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in getattr(saved, "chunks", ())}
        chunks = {chunk for chunk in chunks if 0 not in chunk[1]}
        result[name] = type(saved), getattr(saved, "size", None), str(getattr(saved, "properties", "")), chunks
    return result


def local_values(state: Any) -> list[torch.Tensor]:
    flat = DefaultSavePlanner()
    flat.set_up_planner(state, None, True)
    tensors = [value for value in flat.state_dict.values() if isinstance(value, torch.Tensor)]
    return [value.to_local() if isinstance(value, DTensor) else value for value in tensors]


def save(state: dict[str, Any], folder: Path, collectives: Any) -> None:
    parts, finalize = shard_state(state, "s", collectives)
    write_parts(folder, parts)
    dist.barrier()
    if collectives.rank == 0:
        finalize(folder)
    dist.barrier()


def as_torch_plans(kinds: list[str], folder: str) -> list[dict[str, Any]]:
    return [as_torch_plans_one(kind, f"{folder}/{kind}") for kind in kinds]


def as_torch_plans_one(kind: str, folder: str) -> dict[str, Any]:
    Path(folder).mkdir(exist_ok=True)
    collectives = Counted(PartialState().collectives)
    mesh, placements = layouts(kind, collectives.world_size)
    state = odd_state(mesh, placements)
    save(state, Path(folder), collectives)
    sent, calls = collectives.sent, collectives.calls
    planner = DefaultSavePlanner()
    planner.set_up_planner(state, is_coordinator=collectives.rank == 0)
    plans: list[Any] = [None] * collectives.world_size
    dist.all_gather_object(plans, planner.create_local_plan())
    _, expected = planner.create_global_plan(plans)
    metadata = read_metadata(Path(folder, "s"))
    assert comparable(metadata) == comparable(expected)
    assert metadata.planner_data == expected.planner_data
    # torch's own reader loads it.
    before = [value.clone() for value in local_values(state)]
    for value in local_values(state):
        value.zero_()
    state["step"] = 0
    dcp.load(state, checkpoint_id=f"{folder}/s")
    assert all(map(torch.equal, before, local_values(state))) and state["step"] == 3
    assert state["optimizer"]["param_groups"][0]["betas"] == (0.9, 0.99)
    return {"sent": sent, "calls": calls, "bytes": Path(folder, "s", f"__{collectives.rank}_0.distcp").stat().st_size}


def test_metadata_is_that_of_torch_and_nothing_is_exchanged(tmp_path: Path) -> None:
    for results in run_world(as_torch_plans, 4, ["fsdp", "hsdp", "tp"], str(tmp_path), timeout=120):
        for result in results:
            assert result["calls"] == 1 and result["sent"] <= 128 and result["bytes"] > 0


def stage_state(rank: int) -> dict[str, Any]:
    """Four ranks: two pipeline stages, each sharded over two ranks; rank 3 has a value of its own."""
    meshes = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    stage = rank // 2
    torch.manual_seed(stage)
    own = {f"layer{stage}.weight": distribute_tensor(torch.randn(5, 3), meshes["dp"], [Shard(0)])}
    shared = {"embedding": torch.arange(6.0), f"only{stage}": torch.full((4,), float(stage))}
    values = {"everybody": 1, **({"of rank 3": "x" * rank} if rank == 3 else {})}
    return {"model": {**own, **shared}, "values": values}


def of_stages(folder: str) -> list[Any]:
    collectives = Counted(PartialState().collectives)
    state = stage_state(collectives.rank)
    results = []
    for number in range(2):
        before = collectives.sent
        save(state, Path(folder, str(number)), collectives)
        results.append(collectives.sent - before)
    read = read_shards(Path(folder, "1", "s"), lambda path, size, dtype: torch.zeros(size, dtype=dtype), "model")
    for name, value in state["model"].items():
        assert torch.equal(read[name], value.full_tensor() if isinstance(value, DTensor) else value), name
    assert set(read) == {"layer0.weight", "layer1.weight", "embedding", "only0", "only1"}
    assert read_shards(Path(folder, "1", "s"), lambda *_: None, "values") == {"everybody": 1, "of rank 3": "xxx"}
    # A rank that knows nothing, as one that has taken the place of another.
    if collectives.rank == 1:
        sharded_writer._known.clear()
    save(state, Path(folder, "2"), collectives)
    torch.testing.assert_close(
        read_shards(Path(folder, "2", "s"), lambda path, size, dtype: torch.zeros(size, dtype=dtype), "model"), read
    )
    return results


def test_metadata_is_made_again_only_for_another_structure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    real = sharded_writer.metadata_of
    monkeypatch.setattr(sharded_writer, "metadata_of", lambda *args: made.append(1) or real(*args))
    collectives = PartialState().collectives
    for number, state in enumerate(
        [
            {"w": torch.ones(3), "lr": 0.1},
            {"w": torch.zeros(3), "lr": 0.2},
            {"w": torch.zeros(3), "lr": 0.2, "more": 1},
            {"w": torch.ones(4), "lr": 0.2, "more": 1},
            {"w": torch.ones(4), "lr": "a text of another length" * 9, "more": 1},
        ]
    ):
        parts, finalize = shard_state({"model": state}, "s", collectives)
        folder = tmp_path / str(number)
        folder.mkdir()
        write_parts(folder, parts)
        finalize(folder)
        read = read_shards(folder / "s", lambda path, size, dtype: torch.empty(size, dtype=dtype), "model")
        assert torch.equal(read.pop("w"), state.pop("w")) and read == state
    assert len(made) == 4


def test_what_only_some_ranks_have_is_exchanged_once(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / str(number)).mkdir()
    # Rank 3 sends the value that only it has at every save.
    for rank, (first, second) in enumerate(run_world(of_stages, 4, str(tmp_path), timeout=120)):
        assert second <= 300 + 1200 * (rank == 3) and second <= first
    assert len(list((tmp_path / "1" / "s").glob("*.distcp"))) == 4


def refused() -> list[str]:
    state = PartialState()
    shape = torch.ones(2 + state.process_index)
    partial: Any = torch.ones(2)
    if state.process_index:
        partial = DTensor.from_local(torch.ones(2), init_device_mesh("cpu", (2,)), [Partial()])
    else:
        init_device_mesh("cpu", (2,))
    errors = []
    for content in (shape, partial):
        with pytest.raises(CheckpointError) as error:
            shard_state({"model": {"weight": content}}, "s", state.collectives)
        errors.append(str(error.value))
    return errors


def test_ranks_that_disagree_all_get_the_error() -> None:
    for shape, partial in run_world(refused, 2, timeout=60):
        assert "(2,)" in shape and re.search("weight|shape|rank", partial)


def test_tensors_are_spread_by_bytes() -> None:
    sizes = {f"t{index}": size for index, size in enumerate([100, 1, 1, 50, 50, 1, 30, 70])}
    writers = spread(sizes, {}, 3)
    loads = [sum(sizes[name] for name in sizes if writers[name] == rank) for rank in range(3)]
    assert max(loads) - min(loads) <= 3 and sum(loads) == sum(sizes.values())
    limited = spread(sizes, {name: [2] for name in sizes}, 3)
    assert set(limited.values()) == {2}


def saved_archive(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("shape", [(), (0,), (3, 5), (100, 64)])
def test_the_data_of_an_archive_are_where_zipfile_finds_them(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    content = saved_archive(torch.arange(torch.Size(shape).numel(), dtype=dtype).reshape(shape))
    with zipfile.ZipFile(io.BytesIO(content)) as opened:
        data, description = opened.read("archive/data/0"), opened.read("archive/data.pkl")
    # Nothing between the first and the last bytes is read.
    hidden = bytearray(content)
    hidden[archive.HEAD_BYTES : -archive.TAIL_BYTES] = bytes(len(hidden[archive.HEAD_BYTES : -archive.TAIL_BYTES]))
    found = archive.data_range(memoryview(hidden))
    assert found is not None and (content[found[0] : found[1]], found[2]) == (data, description)


def test_sizes_of_more_than_32_bits_are_found_in_the_extra_field(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in archives of more than 4 GiB: beyond its limit zipfile writes them, and the end, like that."""
    value = torch.arange(1000.0)
    source = zipfile.ZipFile(io.BytesIO(saved_archive(value)))
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 3000)
    with zipfile.ZipFile(buffer := io.BytesIO(), "w") as target:
        for name in ("data.pkl", "byteorder", "data/0"):
            with target.open(f"archive/{name}", "w", force_zip64=True) as file:
                file.write(source.read(f"archive/{name}"))
    content = memoryview(buffer.getvalue())
    assert b"PK\6\6" in buffer.getvalue() and struct.pack("<HHQQ", 1, 16, 4000, 4000) in buffer.getvalue()
    found = archive.data_range(content)
    assert found is not None and torch.equal(
        torch.frombuffer(bytearray(content[found[0] : found[1]]), dtype=value.dtype), value
    )


def test_other_contents_have_no_range() -> None:
    """Two tensors, compressed or cut archives, and damaged ones: nothing is raised, and no range leads outside."""
    tensor = torch.arange(6.0)
    content = saved_archive(tensor)
    assert archive.data_range(memoryview(saved_archive([tensor, tensor + 1]))) is None
    assert archive.data_range(memoryview(b"")) is None
    with zipfile.ZipFile(buffer := io.BytesIO(), "w", zipfile.ZIP_DEFLATED) as target:
        for info in zipfile.ZipFile(io.BytesIO(content)).infolist():
            target.writestr(info.filename, zipfile.ZipFile(io.BytesIO(content)).read(info))
    assert archive.data_range(memoryview(buffer.getvalue())) is None
    for length in range(len(content)):
        assert archive.data_range(memoryview(content)[:length]) is None
    draw = random.Random(0)
    for _ in range(400):
        damaged = bytearray(content)
        damaged[draw.randrange(len(content) - 600, len(content))] = draw.randrange(256)
        found = archive.data_range(memoryview(damaged))
        assert found is None or 0 <= found[0] <= found[1] <= len(content)


class CountingFiles(MappedFiles):
    """Counts the bytes that are asked for, and hides all others."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.count, self.visible, self.directory = 0, {}, directory

    def fetch(self, ranges: Any) -> None:
        for name, begin, end in ranges:
            content = (self.directory / name).read_bytes()
            file = self.visible.setdefault(name, bytearray(len(content)))
            file[begin:end] = content[begin:end]
            self.count += end - begin

    def view(self, name: str, begin: int, end: int) -> memoryview:
        return memoryview(self.visible[name])[begin:end]


def sharded_like(full: torch.Tensor, mesh_shape: tuple[int, ...], placements: list[Any]) -> torch.Tensor:
    """Its part of a tensor; all of it in one process."""
    if mesh_shape == (1,):
        return full
    return distribute_tensor(full, init_device_mesh("cpu", mesh_shape), placements)


Layout = tuple[tuple[int, ...], list[Any]]


def part_of(layout: Layout, folder: str) -> float:
    """Read a rank's part through a store that gives nothing but what was asked for; returns bytes read per needed."""
    like = {name: sharded_like(torch.zeros(1024, 512), *layout) for name in ("w0", "w1")}
    source = CountingFiles(Path(folder, "s"))
    read = read_shards(source.directory, lambda path, size, dtype: like[path[0]], "model", source)
    for number in range(2):
        torch.manual_seed(number)
        expected = sharded_like(torch.randn(1024, 512), *layout)
        ((_, part),), ((_, wanted),) = regions(read[f"w{number}"]), regions(expected)
        assert torch.equal(part, wanted), number
    return source.count / sum(regions(value)[0][1].nbytes for value in read.values())


def write_and_read(layouts: dict[str, Layout], read: list[str], layout: Layout, folder: str) -> list[float]:
    """Write two tensors in each layout, in a directory of its name, and read those of others in one."""
    for name, (mesh_shape, kinds) in layouts.items():
        mesh, state = init_device_mesh("cpu", mesh_shape), {}
        for number in range(2):
            torch.manual_seed(number)
            state[f"w{number}"] = distribute_tensor(torch.randn(1024, 512), mesh, kinds)
        Path(folder, name).mkdir(exist_ok=True)
        save({"model": state}, Path(folder, name), PartialState().collectives)
    return [part_of(layout, f"{folder}/{name}") for name in read]


def test_bytes_read_are_those_needed(tmp_path: Path) -> None:
    """Of four ranks on two and one, of two on four, and of columns on ranks that have rows."""
    rows, folder = [Shard(0)], str(tmp_path)
    of_two = {"two": ((2,), rows), "columns": ((2,), [Shard(1)])}
    ratios = run_world(write_and_read, 4, {"four": ((4,), rows)}, [], ((4,), rows), folder, timeout=60)
    ratios += run_world(write_and_read, 2, of_two, ["four"], ((2,), rows), folder, timeout=60)
    ratios += run_world(write_and_read, 4, {}, ["two", "columns"], ((4,), rows), folder, timeout=60)
    ratios += [[part_of(((1,), rows), f"{folder}/four")]]
    found = [ratio for of_rank in ratios for ratio in of_rank]
    assert len(found) == 2 + 2 * 4 + 1 and max(found) <= 1.05


def test_columns_of_rows_are_read_alone(tmp_path: Path) -> None:
    """One column half of a saved part: each row is a range of its own, and what is between them is not read."""
    torch.manual_seed(0)
    content = torch.randn(8, 3, 40_000)
    dcp.save({"model": {"w": content}}, storage_writer=dcp.FileSystemWriter(tmp_path))
    for place in ((slice(None), slice(1, 2), slice(None)), (slice(2, 5), slice(0, 2), slice(10_000, 30_000))):
        source = CountingFiles(tmp_path)
        target = content[place]
        begin = [part.start or 0 for part in place]

        metadata = read_metadata(tmp_path)
        result = torch.zeros_like(target)
        pieces = reader._pieces_of(
            "x", metadata.storage_data, "model.w", metadata.state_dict_metadata["model.w"], begin, result
        )
        reader._read_files(source, {pieces[0].file: pieces}, {})
        assert torch.equal(result, target)
        assert source.count <= 1.05 * target.nbytes


def test_regions_of_a_plain_tensor() -> None:
    value = torch.ones(2, 3, requires_grad=True)
    ((begin, part),) = regions(value)
    assert begin == (0, 0) and part.data_ptr() == value.data_ptr() and not part.requires_grad


def test_missing_parts_are_an_error(tmp_path: Path) -> None:
    dcp.save({"model": {"w": torch.ones(4)}}, storage_writer=dcp.FileSystemWriter(tmp_path))
    metadata = read_metadata(tmp_path)
    metadata.state_dict_metadata["model.w"].chunks.clear()
    with pytest.raises(CheckpointError, match="4 of 4"):
        read_shards(tmp_path, lambda path, size, dtype: torch.empty(size), "model", metadata=metadata)

"""Sharded files are read as torch reads them, whatever kind of tensor they hold."""

from __future__ import annotations

import enum
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from accel_checkpoint.names import CheckpointError
from accel_checkpoint.sharded import metadata as sharded_metadata
from accel_checkpoint.sharded import reader

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.distributed is disabled")

DTYPES = (
    *(torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int8, torch.bool),
    *(torch.complex64, torch.float8_e4m3fn),
)


def tensors() -> dict[str, torch.Tensor]:
    values = torch.arange(60, dtype=torch.float32).reshape(12, 5)
    content = {f"{dtype} {copy}": values.remainder(7 + copy).to(dtype) for dtype in DTYPES for copy in range(2)}
    views = {"transposed": values.t(), "rows": values[3:7], "columns": values[:, 1:3], "scalar": torch.tensor(3.0)}
    empty = {"no rows": torch.empty(0, 4), "no columns": torch.empty(4, 0)}
    others = {"parameter": nn.Parameter(values * 2), "large": torch.randn(300, 400), "conj": values.cfloat().conj()}
    return {**content, **views, **empty, **others}


def save(directory: Path) -> dict[str, torch.Tensor]:
    content = tensors()
    dcp.save({"model": content}, storage_writer=dcp.FileSystemWriter(directory))
    return content


def test_every_kind_of_tensor(tmp_path: Path) -> None:
    content = save(tmp_path)
    read = reader.read_shards(tmp_path, lambda path, size, dtype: torch.empty(size, dtype=dtype), "model")
    assert set(read) == set(content)
    for name, tensor in content.items():
        assert read[name].dtype == tensor.dtype and torch.equal(
            read[name].to(torch.complex128), tensor.detach().to(torch.complex128)
        ), name


@pytest.mark.parametrize(
    ("offset", "size"),
    [((6, 0), (5, 5)), ((5, 0), (6, 5)), ((7, 0), (6, 5)), ((6, 1), (6, 5))],
    ids=["hole", "overlap", "after the end", "past a row"],
)
def test_parts_that_are_not_the_tensor(offset: tuple[int, int], size: tuple[int, int], tmp_path: Path) -> None:
    """Refused with the metadata, whether or not the tensor is loaded."""
    dcp.save({"model.w": torch.zeros(12, 5)}, storage_writer=dcp.FileSystemWriter(tmp_path))
    metadata = sharded_metadata.read_metadata(tmp_path)
    parts = [((0, 0), (6, 5)), (offset, size)]
    chunks = [ChunkStorageMetadata(torch.Size(begin), torch.Size(sizes)) for begin, sizes in parts]
    metadata.state_dict_metadata["model.w"].chunks[:] = chunks
    with pytest.raises(CheckpointError, match=r"model\.w"):
        sharded_metadata.parse_metadata(pickle.dumps(metadata), "x")
    chunks[1] = ChunkStorageMetadata(torch.Size((6, 0)), torch.Size((6, 5)))
    metadata.state_dict_metadata["model.w"].chunks[:] = chunks
    sharded_metadata.parse_metadata(pickle.dumps(metadata), "x")


class Python3112(pickle.Pickler):
    """Pickles members of enumerations as Python 3.11.0 to 3.11.3 do."""

    def reducer_override(self, obj: Any) -> Any:
        return (getattr, (type(obj), obj.name)) if isinstance(obj, enum.Enum) else NotImplemented


def test_metadata_written_by_python_3_11_2(tmp_path: Path) -> None:
    content = save(tmp_path)
    file = tmp_path / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    with file.open("wb") as opened:
        Python3112(opened).dump(metadata)
    assert b"getattr" in file.read_bytes()
    read = reader.read_shards(tmp_path, lambda path, size, dtype: torch.empty(size, dtype=dtype), "model")
    assert torch.equal(read["large"], content["large"])


def test_getattr_gives_nothing_but_members_of_enumerations(tmp_path: Path) -> None:
    class Attack:
        def __reduce__(self) -> Any:
            return getattr, (dcp.metadata.Metadata, "__init__")

    (tmp_path / ".metadata").write_bytes(pickle.dumps(Attack()))
    with pytest.raises(CheckpointError, match="__init__.*Metadata.*not"):
        sharded_metadata.read_metadata(tmp_path)


def test_metadata_calls_nothing(tmp_path: Path) -> None:
    class Attack:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "made"),)

    (tmp_path / ".metadata").write_bytes(pickle.dumps(Attack()))
    with pytest.raises(CheckpointError, match="mkdir"):
        sharded_metadata.read_metadata(tmp_path)
    assert not (tmp_path / "made").exists()


def test_what_an_extension_has_transformed_is_refused(tmp_path: Path) -> None:
    save(tmp_path)
    metadata = sharded_metadata.read_metadata(tmp_path)
    for info in metadata.storage_data.values():
        info.transform_descriptors = ["some-zip"]
    with pytest.raises(CheckpointError, match="some-zip"):
        reader.read_shards(tmp_path, lambda path, size, dtype: torch.empty(size), "model", metadata=metadata)


def test_into_another_dtype(tmp_path: Path) -> None:
    content = save(tmp_path)
    read = reader.read_shards(
        tmp_path, lambda path, size, dtype: torch.empty(size).double() if path == ("large",) else None, "model"
    )
    assert torch.equal(read["large"], content["large"].double())


def test_a_description_is_unpickled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = {f"w{index}": torch.randn(4, 4) for index in range(20)}
    dcp.save({"model": weights}, storage_writer=dcp.FileSystemWriter(tmp_path))
    calls: list[int] = []
    load = torch.load
    monkeypatch.setattr(torch, "load", lambda *args, **kwargs: calls.append(1) or load(*args, **kwargs))
    reader.read_shards(tmp_path, lambda path, size, dtype: torch.empty(size, dtype=dtype), "model")
    assert len(calls) == 1


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    save(tmp_path)
    (path,) = tmp_path.glob("*.distcp")
    path.write_bytes(path.read_bytes()[:-5000])
    with pytest.raises(CheckpointError, match=path.name):
        reader.read_shards(tmp_path, lambda path, size, dtype: torch.empty(size, dtype=dtype), "model")

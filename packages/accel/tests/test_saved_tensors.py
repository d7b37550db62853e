"""Tensors of sharded files, read straight into their place: the same as torch.load gives, for every kind of them."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accel.fsdp.checkpoint import saved_tensors
from accel.fsdp.checkpoint.saved_tensors import SavedTensors

DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int8,
    torch.bool,
    torch.complex64,
    torch.float8_e4m3fn,
)


def tensors() -> list[torch.Tensor]:
    values = torch.arange(60, dtype=torch.float32).reshape(12, 5)
    found = [values.remainder(7).to(dtype) for dtype in DTYPES]
    found += [
        value + 1 for value in found if value.dtype not in (torch.bool, torch.float8_e4m3fn)
    ]  # kinds that have been seen already
    found += [
        values.t(),
        values[3:7],
        values[:, 1:3],
        values[0, 0].clone(),
        torch.tensor(3.0),
        torch.empty(0, 4),
        torch.empty(4, 0),
    ]
    found += [nn.Parameter(values * 2), torch.complex(values, values).conj(), torch.randn(300, 400)]
    return [*found, values.t() + 1, torch.randn(300, 400)]


def write(path: Path, content: list[torch.Tensor]) -> list[tuple[int, int]]:
    places = []
    with path.open("wb") as file:
        for tensor in content:
            one = io.BytesIO()
            torch.save(tensor, one)
            places.append((file.tell(), len(one.getvalue())))
            file.write(one.getvalue())
    return places


def test_every_kind_of_tensor_is_read_as_torch_reads_it(tmp_path: Path) -> None:
    content = tensors()
    places = write(tmp_path / "file", content)
    kinds: dict[bytes, saved_tensors.Kind] = {}
    with SavedTensors(tmp_path / "file", kinds) as saved:
        for tensor, place in zip(content, places, strict=True):
            for dtype in {tensor.dtype, torch.complex128 if tensor.is_complex() else torch.float64}:
                target = torch.zeros(tensor.shape, dtype=dtype)
                saved.read(*place, torch.Size([0] * tensor.ndim), target)
                assert torch.equal(target, tensor.detach().to(dtype)), (tensor.dtype, tensor.shape)
    assert len(kinds) > len(DTYPES), "kinds are recognised"


@pytest.mark.parametrize(("begin", "shape"), [((2, 0), (5, 5)), ((0, 2), (12, 2)), ((11, 4), (1, 1)), ((4, 0), (0, 5))])
def test_a_part_of_a_tensor_is_read(begin: tuple[int, int], shape: tuple[int, int], tmp_path: Path) -> None:
    values = torch.arange(60.0).reshape(12, 5)
    places = write(tmp_path / "file", [torch.zeros(12, 5), values])
    expected = values[begin[0] : begin[0] + shape[0], begin[1] : begin[1] + shape[1]]
    with SavedTensors(tmp_path / "file", {}) as saved:
        saved.read(*places[0], torch.Size((0, 0)), torch.empty(12, 5))
        # Into memory in order, and into columns of something larger.
        for target in (torch.empty(shape), torch.empty(shape[0], 9)[:, : shape[1]]):
            saved.read(*places[1], torch.Size(begin), target)
            assert torch.equal(target, expected)


def test_torch_load_is_asked_once_for_tensors_that_are_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[Any] = []
    original = torch.load
    monkeypatch.setattr(
        saved_tensors.torch, "load", lambda *args, **kwargs: loaded.append(1) or original(*args, **kwargs)
    )
    content = [torch.randn(8, 3) for _ in range(5)] + [torch.randn(3) for _ in range(5)]
    places = write(tmp_path / "file", content)
    with SavedTensors(tmp_path / "file", {}) as saved:
        for tensor, place in zip(content, places, strict=True):
            target = torch.empty(tensor.shape)
            saved.read(*place, torch.Size([0] * tensor.ndim), target)
            assert torch.equal(target, tensor)
    assert len(loaded) == 2


def test_a_file_that_is_cut_off_or_of_another_shape_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "file"
    places = write(path, [torch.randn(100, 10), torch.randn(100, 10)])
    with SavedTensors(path, {}) as saved:
        saved.read(*places[0], torch.Size((0, 0)), torch.empty(100, 10))
        with pytest.raises(RuntimeError):
            saved.read(*places[1], torch.Size((50, 0)), torch.empty(51, 10))
        path.write_bytes(path.read_bytes()[:-500])
        with pytest.raises(EOFError, match="the file ends at byte"):
            saved.read(*places[1], torch.Size((0, 0)), torch.empty(100, 10))

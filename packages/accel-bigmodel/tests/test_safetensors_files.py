"""The reader of safetensors files accepts the same files as the library, and names those that it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from accel_bigmodel.checkpoint import safetensors_header
from accel_bigmodel.checkpoint.safetensors_file import DTYPES, SafetensorsFile
from accel_bigmodel.checkpoint.safetensors_header import InvalidFileError
from accel_bigmodel.estimate.model import read_headers

F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def file_of(header: Any, data: bytes, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def outcome(path: Path) -> tuple[dict[str, torch.Tensor] | None, dict[str, torch.Tensor] | None]:
    """What the library loads, and what accel loads; None for a refusal."""
    try:
        expected: dict[str, torch.Tensor] | None = load_file(path)
    except Exception:  # the library and torch raise many kinds
        expected = None
    file: SafetensorsFile | None = None
    try:
        file = SafetensorsFile(path)
    except InvalidFileError as error:
        message = str(error)
    if file is not None:
        return expected, file.tensors(file.names())
    assert str(path) in message
    return expected, None


def agree(path: Path) -> bool:
    """Whether both accept the file, with equal tensors, or both refuse it; returns whether it was accepted."""
    expected, found = outcome(path)
    assert (expected is None) == (found is None), (expected, found)
    if expected is None or found is None:
        return False
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        assert (value.dtype, value.shape) == (found[name].dtype, found[name].shape)
        assert value.reshape(-1).view(torch.uint8).tolist() == found[name].reshape(-1).view(torch.uint8).tolist()
    return True


DAMAGED: dict[str, bytes] = {
    "empty": b"",
    "no header": (8).to_bytes(8, "little"),
    "header of 2**63 bytes": (1 << 63).to_bytes(8, "little") + b"{}",
    "header longer than the file": file_of({}, b"", 100),
    "a list": file_of([], b""),
    "not JSON": file_of(b"{x}", b""),
    "not UTF-8": file_of(b'{"\xff": 1}', b""),
    "nested deeply": file_of(b'{"a":' * 5000, b""),
    "lists nested deeply": file_of(b'{"a":' + b"[" * 100_000, b""),
    "overlap": file_of({"a": F32, "b": {**F32, "data_offsets": [4, 12]}}, bytes(12)),
    "same range": file_of({"a": F32, "b": F32}, bytes(8)),
    "hole": file_of({"a": F32, "b": {**F32, "data_offsets": [12, 20]}}, bytes(20)),
    "hole at the start": file_of({"a": {**F32, "data_offsets": [4, 12]}}, bytes(12)),
    "trailing bytes": file_of({"a": F32}, bytes(9)),
    "truncated": file_of({"a": F32}, bytes(7)),
    "same key twice": file_of(
        b'{"a":%s,"a":%s}' % tuple(json.dumps({**F32, "data_offsets": place}).encode() for place in ([0, 8], [8, 16])),
        bytes(16),
    ),
    "float offsets": file_of({"a": {**F32, "data_offsets": [0.0, 8.0]}}, bytes(8)),
    "reversed offsets": file_of({"a": {**F32, "data_offsets": [8, 0]}}, bytes(8)),
    "negative offsets": file_of({"a": {**F32, "data_offsets": [-8, 0]}}, bytes(8)),
    "text offsets": file_of({"a": {**F32, "data_offsets": "08"}}, bytes(8)),
    "three offsets": file_of({"a": {**F32, "data_offsets": [0, 8, 8]}}, bytes(8)),
    "large offsets": file_of({"a": {**F32, "data_offsets": [0, 2**64]}}, bytes(8)),
    "float shape": file_of({"a": {**F32, "shape": [2.0]}}, bytes(8)),
    "negative shape": file_of({"a": {**F32, "shape": [-1, -2]}}, bytes(8)),
    "a number of 5000 digits": file_of(
        b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8],"more":' + b"9" * 5000 + b"}}", bytes(8)
    ),
    "shape that overflows": file_of({"a": {**F32, "shape": [2**62, 4]}}, bytes(8)),
    "another shape": file_of({"a": {**F32, "shape": [3]}}, bytes(8)),
    "no shape": file_of({"a": {"dtype": "F32", "data_offsets": [0, 8]}}, bytes(8)),
    "unknown dtype": file_of({"a": {**F32, "dtype": "F31"}}, bytes(8)),
    "dtype in lower case": file_of({"a": {**F32, "dtype": "f32"}}, bytes(8)),
    "entry is a list": file_of({"a": [1]}, b""),
    "metadata is a list": file_of({"__metadata__": [1], "a": F32}, bytes(8)),
    "metadata with a number": file_of({"__metadata__": {"a": 1}, "a": F32}, bytes(8)),
}
VALID: dict[str, bytes] = {
    "nothing": file_of({}, b""),
    "one": file_of({"a": F32}, bytes(range(8))),
    "order of data": file_of({"b": {**F32, "data_offsets": [8, 16]}, "a": F32}, bytes(range(16))),
    "metadata": file_of({"__metadata__": {"format": "pt"}, "a": F32}, bytes(8)),
    "values without names": file_of({"a": ["F32", [2], [0, 8]]}, bytes(range(8))),
    "no elements": file_of({"a": {"dtype": "F64", "shape": [0, 3], "data_offsets": [0, 0]}}, b""),
    "scalar": file_of({"a": {"dtype": "I16", "shape": [], "data_offsets": [0, 2]}}, b"ab"),
    "further keys": file_of({"a": {**F32, "more": {"x": [1, None, 1.5]}}}, bytes(8)),
    "same entry twice": file_of(b'{"a":%s,"a":%s}' % ((json.dumps(F32).encode(),) * 2), bytes(8)),
    "a long number that is ignored": file_of(
        b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8],"more":' + b"9" * 300 + b"}}", bytes(8)
    ),
    "spaces": file_of(json.dumps({"a": F32}).encode() + b" " * 30, bytes(8)),
    "escapes": file_of({"a\n\u00e4\U0001f600": F32}, bytes(8)),
}


@pytest.fixture(params=["mapped", "too little address space"])
def checked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With and without the library, which maps whole files."""
    if request.param != "mapped":
        monkeypatch.setattr(safetensors_header, "_check_by_library", lambda path: False)


@pytest.mark.usefixtures("checked")
@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_files(tmp_path: Path, name: str) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(DAMAGED[name])
    assert not agree(path)
    with pytest.raises(SafetensorError, match=r"m\.safetensors"):
        SafetensorsFile(path)


@pytest.mark.usefixtures("checked")
@pytest.mark.parametrize("name", VALID)
def test_valid_files(tmp_path: Path, name: str) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(VALID[name])
    assert agree(path)


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(tmp_path: Path, dtype: str) -> None:
    value = torch.zeros(3, 2, dtype=DTYPES[dtype])
    save_file({"a": value}, tmp_path / "m.safetensors")
    assert agree(tmp_path / "m.safetensors")


def test_an_estimate_refuses_the_same_files(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    for name in ("hole", "trailing bytes", "nested deeply", "float offsets", "same key twice"):
        path.write_bytes(DAMAGED[name])
        with pytest.raises(InvalidFileError, match=r"m\.safetensors"):
            read_headers([path])


NUMBERS = st.one_of(st.integers(-3, 40), st.sampled_from([0.0, 8.0, 1e30, 2**63, 2**64, 2**70, True, None, "8"]))
ENTRIES = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "F16", "U8", "I64", "BOOL", "F8_E8M0", "F4", "X", 3]),
        "shape": st.lists(NUMBERS, max_size=3),
        "data_offsets": st.lists(NUMBERS, min_size=1, max_size=3),
    },
    optional={"more": st.recursive(NUMBERS, st.lists)},
)
CONSISTENT = st.lists(
    st.tuples(st.sampled_from(["F32", "F16", "U8"]), st.lists(st.integers(0, 3), max_size=3)), max_size=4
)


def consistent(tensors: list[tuple[str, list[int]]]) -> tuple[dict[str, Any], int]:
    header, offset = {}, 0
    for index, (dtype, shape) in enumerate(tensors):
        size = torch.Size(shape).numel() * DTYPES[dtype].itemsize
        header[f"t{index}"] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    return header, offset


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    tensors=CONSISTENT,
    changes=st.dictionaries(
        st.sampled_from(["t0", "t1", "x", "__metadata__"]), st.one_of(ENTRIES, NUMBERS), max_size=2
    ),
    extra=st.sampled_from([-1, 0, 0, 0, 1]),
    flips=st.lists(st.tuples(st.integers(0, 200), st.integers(0, 255)), max_size=2),
)
@example(tensors=[("F32", [2])], changes={}, extra=0, flips=[])
def test_generated_headers(
    tmp_path: Path, tensors: Any, changes: dict[str, Any], extra: int, flips: list[tuple[int, int]]
) -> None:
    header, size = consistent(tensors)
    content = bytearray(file_of({**header, **changes}, bytes(max(size + extra, 0))))
    for place, value in flips:
        content[place % len(content)] = value
    path = tmp_path / "m.safetensors"
    path.write_bytes(content)
    accepted = agree(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(safetensors_header, "_check_by_library", lambda path: False)
        assert agree(path) == accepted
    assert accepted or changes or extra or flips, "a consistent header is accepted"

"""Reads directories of ``torch.distributed.checkpoint`` without running code and without inter-rank communication."""

from __future__ import annotations

import enum
import io
import mmap
import pickle
import struct
import sys
import warnings
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem

from accel_checkpoint.names import SHARD_TABLE_NAME, CheckpointError
from accel_state.paths import leads_outside

from ..._torch_compat import load_alone

Like = Callable[[tuple[Any, ...], torch.Size, torch.dtype], "torch.Tensor | None"]
"""Allocates memory for a saved tensor, full or this rank's part, from its path in the nested state, its full shape and
its dtype; None skips the tensor."""

# What the directory of an archive of one tensor fits in; it takes about 600 bytes.
_TAIL_BYTES = 4096

# All classes in the metadata that torch writes; they only hold values.
_ALLOWED = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata",
        "MetadataIndex",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "TensorProperties",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {
        "Size",
        *(str(dtype).removeprefix("torch.") for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)),
    },
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"},
    "pathlib._local": {"PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"},
}


def _enum_member(owner: Any, name: str) -> Any:
    """A member of an enumeration, which Python 3.11.0 to 3.11.3 pickle as a call of ``getattr``."""
    if not isinstance(owner, enum.EnumMeta) or name not in owner.__members__:
        raise pickle.UnpicklingError(f"it refers to {name} of {owner}, which is not a member of an enumeration")
    return owner[name]


class _SafeUnpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, classes: Mapping[tuple[str, str], type]) -> None:
        super().__init__(file)
        self._classes = classes

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in self._classes:
            return self._classes[module, name]
        if (module, name) == ("builtins", "getattr"):
            return _enum_member
        if name in _ALLOWED.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it refers to {module}.{name}, which checkpoint metadata does not need")


def read_metadata(directory: Path, classes: Mapping[tuple[str, str], type] | None = None) -> Metadata:
    """The metadata of a directory.

    Args:
        directory: the directory.
        classes: what to create for classes in it other than torch's, by their module and name.
    """
    path = directory / SHARD_TABLE_NAME
    if leads_outside(directory, SHARD_TABLE_NAME):
        raise CheckpointError(f"{path} is a link that leads outside of the directory. It is not read.")
    try:
        metadata = _SafeUnpickler(io.BytesIO(path.read_bytes()), classes or {}).load()
        _check(metadata, directory)
    except FileNotFoundError:
        raise CheckpointError(
            f"{directory} has no {SHARD_TABLE_NAME}, the metadata of a sharded state. Copy the checkpoint again."
        ) from None
    except Exception as error:
        raise CheckpointError(
            f"{path} cannot be read: {error}. Copy the checkpoint again, or load another one."
        ) from error
    return metadata


def _check(metadata: Any, directory: Path) -> None:
    if not isinstance(metadata, Metadata) or not isinstance(metadata.state_dict_metadata, dict):
        raise ValueError("it does not hold checkpoint metadata")
    names: set[str] = set()
    for info in (metadata.storage_data or {}).values():
        name = info.relative_path
        if not isinstance(name, str) or Path(name).name != name or name in (".", ".."):
            raise ValueError(f"{name!r} is not a file of this directory")
        if name not in names and leads_outside(directory, name):
            raise ValueError(f"{name} is a link that leads outside of the directory")
        names.add(name)
        if info.offset < 0 or info.length < 0:
            raise ValueError(f"a part of {name} is at {info.offset} and has {info.length} bytes")
    for name, saved in metadata.state_dict_metadata.items():
        if isinstance(saved, TensorStorageMetadata):
            _check_chunks(name, saved)


def _check_chunks(name: str, saved: TensorStorageMetadata) -> None:
    """Raise ValueError if the parts of a tensor are not all of it: what no part covers would be read as garbage."""
    parts = [chunk for chunk in saved.chunks if chunk.sizes.numel()]
    begins = np.array([chunk.offsets for chunk in parts], dtype=np.int64).reshape(len(parts), len(saved.size))
    ends = begins + np.array([chunk.sizes for chunk in parts], dtype=np.int64).reshape(begins.shape)
    if (begins < 0).any() or (ends > np.array(saved.size, dtype=np.int64)).any():
        raise ValueError(f"{name} of {tuple(saved.size)} has a part outside of it")
    if sum(chunk.sizes.numel() for chunk in parts) != saved.size.numel():
        raise ValueError(f"the parts of {name} are not {saved.size.numel()} values together")
    if not saved.size:
        return  # a scalar, with its one part
    order = np.lexsort(begins.T[::-1])
    begins, ends = begins[order], ends[order]
    for index in range(len(parts) - 1):
        # Later parts that begin after the end of this one, in the first dimension, are apart from it.
        last = np.searchsorted(begins[:, 0], ends[index, 0])
        after, until = begins[index + 1 : last], ends[index + 1 : last]
        if ((after < ends[index]) & (until > begins[index])).all(axis=1).any():
            raise ValueError(f"two parts of {name} overlap")


class _Reader(FileSystemReader):
    """torch's reader, given metadata that has been read safely."""

    def __init__(self, directory: Path, metadata: Metadata) -> None:
        super().__init__(directory)
        self._safe_metadata = metadata
        self._sizes: dict[tuple[str, Any], torch.Size] = {}
        for name, saved in metadata.state_dict_metadata.items():
            if isinstance(saved, TensorStorageMetadata):
                self._sizes.update({(name, chunk.offsets): chunk.sizes for chunk in saved.chunks})

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._safe_metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> torch.futures.Future[None]:
        """Read file by file, so that an error names the damaged one."""
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            by_file.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        known: dict[bytes, tuple[torch.dtype, torch.Size]] = {}
        for name, items in by_file.items():
            try:
                with open(Path(self.path) / name, "rb") as file:
                    mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
                others = [item for item in items if not self._copy_mapped(item, mapped, planner, known)]
                super().read_data(replace(plan, items=others), planner)
            except Exception as error:
                raise CheckpointError(f"{Path(self.path) / name}: {' '.join(str(error).split())[:300]}") from error
        done: torch.futures.Future[None] = torch.futures.Future()
        done.set_result(None)
        return done

    def _copy_mapped(
        self,
        item: ReadItem,
        mapped: mmap.mmap,
        planner: LoadPlanner,
        known: dict[bytes, tuple[torch.dtype, torch.Size]],
    ) -> bool:
        """Copy a tensor from the mapped file, without unpickling or a second copy; False leaves it to torch."""
        info = self.storage_data[item.storage_index]
        if item.type is LoadItemType.BYTE_IO or getattr(info, "transform_descriptors", None):
            return False
        content = memoryview(mapped)[info.offset : info.offset + info.length]
        full = _map_tensor(content, known)
        if full is None:
            return False
        index = item.storage_index
        if full.shape != self._sizes[index.fqn, index.offset]:
            raise ValueError(f"the part of {index.fqn} has shape {tuple(full.shape)}, other than in {SHARD_TABLE_NAME}")
        target = planner.resolve_tensor(item).detach()
        for dim, (begin, size) in enumerate(zip(item.storage_offsets, target.shape, strict=True)):
            full = full.narrow(dim, begin, size)
        target.copy_(full)
        planner.commit_tensor(item, target)
        return True


def _map_tensor(content: memoryview, known: dict[bytes, tuple[torch.dtype, torch.Size]]) -> torch.Tensor | None:
    """A tensor that shares the memory of what ``torch.save`` has written; None for anything but a contiguous tensor."""
    # The directory of the archive is at its end; header_offset is relative to what zipfile is given.
    tail = content[-_TAIL_BYTES:]
    try:
        infos = zipfile.ZipFile(io.BytesIO(tail)).infolist()
    except zipfile.BadZipFile:
        return None
    records = {}
    for info in infos:
        header = info.header_offset + len(content) - len(tail)
        name_length, extra_length = struct.unpack_from("<HH", content, header + 26)
        begin = header + 30 + name_length + extra_length
        records[info.filename.partition("/")[2]] = content[begin : begin + info.file_size]
        if info.compress_type != zipfile.ZIP_STORED:
            return None
    description = bytes(records.get("data.pkl", b""))
    if "data/0" not in records or "data/1" in records or bytes(records.get("byteorder", b"")) != sys.byteorder.encode():
        return None
    if description not in known:
        tensor = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        is_plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided and not tensor.is_quantized
        if not is_plain or tensor.is_neg() or tensor.is_conj() or not tensor.is_contiguous():
            return None
        known[description] = tensor.dtype, tensor.shape
    dtype, shape = known[description]
    if len(records["data/0"]) != shape.numel() * dtype.itemsize:
        return None
    return (
        torch.frombuffer(records["data/0"], dtype=dtype).view(shape)
        if shape.numel()
        else torch.empty(shape, dtype=dtype)
    )


class _Planner(DefaultLoadPlanner):
    """torch's planner for a flat state, which loads values other than tensors without running code."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True)


def read_shards(directory: Path, like: Like, root: str) -> dict[str, Any]:
    """Read the parts of a sharded state that this rank needs."""
    metadata = read_metadata(directory)
    try:
        state = _allocate(directory, metadata, like, root)
        with warnings.catch_warnings():
            # Each rank knows what it needs, so the lack of communication is intended.
            warnings.filterwarnings("ignore", message=".*torch.distributed is disabled, unavailable or uninitialized.*")
            planner = _Planner(flatten_state_dict=False, flatten_sharded_tensors=False)
            load_alone(state, _Reader(directory, metadata), planner)
        return dict(_nested({_path(metadata, name)[1:]: value for name, value in state.items()}))
    except CheckpointError:
        raise
    except (Exception, CheckpointException) as error:  # torch's own is no Exception
        raise CheckpointError(
            f"{directory} cannot be read: {_reason(error)}. Copy the checkpoint again, or load another one."
        ) from error


def tensors_in(directory: Path, root: str) -> dict[str, torch.Tensor]:
    """The tensors of a directory by name, on the meta device; no tensor data is read."""
    metadata = read_metadata(directory)
    tensors = {}
    for name, saved in metadata.state_dict_metadata.items():
        path = _path(metadata, name)
        if path[0] == root and isinstance(saved, TensorStorageMetadata):
            dtype = saved.properties.dtype
            tensors[".".join(map(str, path[1:]))] = torch.empty(saved.size, dtype=dtype, device="meta")
    return tensors


def _allocate(directory: Path, metadata: Metadata, like: Like, root: str) -> dict[str, Any]:
    state: dict[str, Any] = {}
    is_empty = True
    for name, saved in metadata.state_dict_metadata.items():
        path = _path(metadata, name)
        if path[0] != root:
            continue
        is_empty = False
        if isinstance(saved, BytesStorageMetadata):
            state[name] = io.BytesIO()
        elif not isinstance(saved, TensorStorageMetadata):
            raise CheckpointError(f"{directory}: {name} is neither a tensor nor a value.")
        elif (memory := like(path[1:], saved.size, saved.properties.dtype)) is not None:
            state[name] = memory
    if is_empty:
        raise CheckpointError(f"{directory} holds no {root}.")
    return state


def _path(metadata: Metadata, name: str) -> tuple[Any, ...]:
    path = (metadata.planner_data or {}).get(name)
    return tuple(path) if path else tuple(name.split(".", 1))


def _nested(flat: dict[tuple[Any, ...], Any]) -> Any:
    """Nested dictionaries, and lists where keys are numbers."""
    branches: dict[Any, dict[tuple[Any, ...], Any]] = {}
    for path, value in flat.items():
        if not path:
            return value
        branches.setdefault(path[0], {})[path[1:]] = value
    nested = {key: _nested(branch) for key, branch in branches.items()}
    if nested and all(isinstance(key, int) for key in nested):
        return [nested[key] for key in sorted(nested)]
    return nested


def _reason(error: BaseException) -> str:
    if isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    return " ".join(str(error).split())[:500] or type(error).__name__


class SavedTensors:
    """Parts of the tensors in a directory, read one by one from the mapped files.

    Args:
        directory: the directory.
        classes: as in :func:`read_metadata`.
    """

    def __init__(self, directory: Path, classes: Mapping[tuple[str, str], type] | None = None) -> None:
        self.directory = directory
        metadata = read_metadata(directory, classes)
        self._tensors = {
            name: saved
            for name, saved in metadata.state_dict_metadata.items()
            if isinstance(saved, TensorStorageMetadata)
        }
        self._places = {(index.fqn, index.offset): info for index, info in metadata.storage_data.items()}
        self._files: dict[str, memoryview] = {}
        self._known: dict[bytes, tuple[torch.dtype, torch.Size]] = {}
        self.names = list(self._tensors)

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def shape(self, name: str) -> torch.Size:
        """The shape of a tensor."""
        return self._tensors[name].size

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of a tensor."""
        return self._tensors[name].properties.dtype

    def read(self, name: str, first: Sequence[int] = ()) -> torch.Tensor:
        """The part of a tensor at its first indices: ``read(name, (3,))`` is ``tensor[3]``."""
        shape = self.shape(name)[len(first) :]
        result: torch.Tensor | None = None
        missing = shape.numel()
        for chunk in self._tensors[name].chunks:
            starts = list(zip(first, chunk.offsets, chunk.sizes, strict=False))
            if any(not begin <= index < begin + size for index, begin, size in starts):
                continue
            part = self._chunk(name, chunk.offsets, chunk.sizes)
            for index, begin, _ in starts:
                part = part[index - begin]
            if part.shape == shape:
                return part
            result = torch.empty(shape, dtype=self.dtype(name)) if result is None else result
            offsets = chunk.offsets[len(first) :]
            place = tuple(slice(begin, begin + size) for begin, size in zip(offsets, part.shape, strict=True))
            result[place] = part
            missing -= part.numel()
        if missing or result is None:
            raise CheckpointError(f"{self.directory} lacks {missing} of the {shape.numel()} values of {name}.")
        return result

    def _chunk(self, name: str, offsets: torch.Size, sizes: torch.Size) -> torch.Tensor:
        try:
            info = self._places[name, offsets]
            if info.relative_path not in self._files:
                with open(self.directory / info.relative_path, "rb") as file:
                    mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
                self._files[info.relative_path] = memoryview(mapped)
            content = self._files[info.relative_path][info.offset : info.offset + info.length]
            part = _map_tensor(content, self._known)
            if part is None:
                part = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
            return part.view(sizes)
        except Exception as error:
            raise CheckpointError(
                f"{self.directory} cannot be read: the part of {name} at {tuple(offsets)}: {_reason(error)}. Copy the "
                "checkpoint again."
            ) from error

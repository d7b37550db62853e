"""Reads the metadata of ``torch.distributed.checkpoint``, a pickle, without running code."""

from __future__ import annotations

import enum
import io
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from accel_state.paths import leads_outside

from ..gc_pause import without_collection
from ..names import SHARD_TABLE_NAME, CheckpointError

Classes = Mapping[tuple[str, str], type]

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
    """Return a member of an enumeration, which Python 3.11.0 to 3.11.3 pickle as a call of ``getattr``."""
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


def read_metadata(directory: Path, classes: Classes | None = None) -> Metadata:
    """Return the metadata of a directory.

    Args:
        directory: the directory.
        classes: what to create for classes in it other than torch's, by their module and name.
    """
    path = directory / SHARD_TABLE_NAME
    if leads_outside(directory, SHARD_TABLE_NAME):
        raise CheckpointError(f"{path} is a link that leads outside of the directory. It is not read.")
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise CheckpointError(
            f"{directory} has no {SHARD_TABLE_NAME}, the metadata of a sharded state. Copy the checkpoint again."
        ) from None
    metadata = parse_metadata(content, str(path), classes)
    for name in {info.relative_path for info in (metadata.storage_data or {}).values()}:
        if leads_outside(directory, name):
            raise CheckpointError(
                f"{path} cannot be read: {name} is a link that leads outside of the directory. Copy the checkpoint "
                "again, or load another one."
            )
    return metadata


def parse_metadata(content: bytes, where: str, classes: Classes | None = None) -> Metadata:
    """Return the metadata in the bytes of its file.

    Args:
        content: the bytes.
        where: the file, for messages.
        classes: as in :func:`read_metadata`.
    """
    try:
        with without_collection():
            metadata = _SafeUnpickler(io.BytesIO(content), classes or {}).load()
            _check(metadata)
    except Exception as error:
        raise CheckpointError(
            f"{where} cannot be read: {error}. Copy the checkpoint again, or load another one."
        ) from error
    return metadata


def _check(metadata: Any) -> None:
    if not isinstance(metadata, Metadata) or not isinstance(metadata.state_dict_metadata, dict):
        raise ValueError("it does not hold checkpoint metadata")
    names: set[str] = set()
    for info in (metadata.storage_data or {}).values():
        name = info.relative_path
        if name not in names:
            if not isinstance(name, str) or Path(name).name != name or name in (".", ".."):
                raise ValueError(f"{name!r} is not a file of this directory")
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
    if (begins[1:, 0] >= ends[:-1, 0]).all():
        return  # the usual case: rows, one rank after the other
    for index in range(len(parts) - 1):
        # Later parts that begin after the end of this one, in the first dimension, are apart from it.
        last = np.searchsorted(begins[:, 0], ends[index, 0])
        after, until = begins[index + 1 : last], ends[index + 1 : last]
        if ((after < ends[index]) & (until > begins[index])).all(axis=1).any():
            raise ValueError(f"two parts of {name} overlap")

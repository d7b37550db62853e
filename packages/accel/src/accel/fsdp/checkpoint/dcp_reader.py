"""Reading folders of ``torch.distributed.checkpoint``, without running code and without a word between ranks."""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem

from ...checkpoint.names import SHARD_TABLE_NAME as METADATA_NAME
from ...checkpoint.names import CheckpointError
from .saved_tensors import Kind, SavedTensors

Like = Callable[[tuple[Any, ...], torch.Size, torch.dtype], "torch.Tensor | None"]
"""Memory for a saved tensor, whole or this rank's part of it, from its path in the nested state, its whole shape and
its dtype; None leaves the tensor out."""

# Everything that torch writes into a table of contents, and nothing that does more than hold values.
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


class _SafeUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _ALLOWED.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which a table of contents does not need")


def read_metadata(folder: Path) -> Metadata:
    """The table of contents of a folder.

    Raises:
        CheckpointError: it is missing or damaged, reading it could run code, or it points outside of the folder.
    """
    path = folder / METADATA_NAME
    try:
        metadata = _SafeUnpickler(io.BytesIO(path.read_bytes())).load()
        _check(metadata)
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder} has no {METADATA_NAME}, the table of contents of a sharded state. Copy the checkpoint again."
        ) from None
    except Exception as error:
        raise CheckpointError(
            f"{path} cannot be read: {error}. Copy the checkpoint again, or load another one."
        ) from error
    return metadata


def _check(metadata: Any) -> None:
    if not isinstance(metadata, Metadata) or not isinstance(metadata.state_dict_metadata, dict):
        raise ValueError("it is no table of contents")
    for place in (metadata.storage_data or {}).values():
        name = place.relative_path
        if not isinstance(name, str) or Path(name).name != name or name in (".", ".."):
            raise ValueError(f"{name!r} is not a file of this folder")
        if place.offset < 0 or place.length < 0:
            raise ValueError(f"a part of {name} at {place.offset} of {place.length} bytes")


class _Reader(FileSystemReader):
    """torch's reader, with a table of contents that has been read already."""

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        super().__init__(folder)
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> torch.futures.Future[None]:
        """Read file by file, so that an error names the one that is damaged."""
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            by_file.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        kinds: dict[bytes, Kind] = {}
        for name, items in by_file.items():
            try:
                with SavedTensors(Path(self.path) / name, kinds) as saved:
                    left = [item for item in items if not self._read_tensor(item, saved, planner)]
                super().read_data(replace(plan, items=left), planner)
            except Exception as error:
                raise CheckpointError(f"{Path(self.path) / name}: {' '.join(str(error).split())[:300]}") from error
        done: torch.futures.Future[None] = torch.futures.Future()
        done.set_result(None)
        return done

    def _read_tensor(self, item: ReadItem, saved: SavedTensors, planner: LoadPlanner) -> bool:
        """Read a tensor; False for other values, and for files that have been changed on the way to the disk
        (compressed, say).
        """
        place = self.storage_data[item.storage_index]
        if item.type is LoadItemType.BYTE_IO or getattr(place, "transform_descriptors", None):
            return False
        target = planner.resolve_tensor(item).detach()
        saved.read(place.offset, place.length, torch.Size(item.storage_offsets), target)
        planner.commit_tensor(item, target)
        return True


class _Planner(DefaultLoadPlanner):
    """torch's planner for a flat state, with values other than tensors read as harmless ones only."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True)


def read_shards(folder: Path, like: Like, root: str) -> dict[str, Any]:
    """A state that was saved sharded, as far as this rank needs it.

    Args:
        folder: the folder.
        like: what to read each tensor into.
        root: what the folder holds: "model" or "optimizer".

    Returns:
        What was saved under that name.

    Raises:
        CheckpointError: files are missing or damaged, or reading them could run code.
    """
    metadata = read_metadata(folder)
    wanted = _memory(folder, metadata, like, root)
    try:
        with warnings.catch_warnings():
            # Each rank knows what it needs: that they do not talk is meant.
            warnings.filterwarnings("ignore", message=".*torch.distributed is disabled, unavailable or uninitialized.*")
            dcp.load(
                wanted,
                storage_reader=_Reader(folder, metadata),
                planner=_Planner(flatten_state_dict=False, flatten_sharded_tensors=False),
                no_dist=True,
            )
    except (Exception, CheckpointException) as error:  # torch's own is no Exception
        raise CheckpointError(
            f"{folder} cannot be read: {_reason(error)}. Copy the checkpoint again, or load another one."
        ) from error
    state: dict[str, Any] = _nested({_path(metadata, name)[1:]: value for name, value in wanted.items()})
    return state


def tensors_in(folder: Path, root: str) -> dict[str, torch.Tensor]:
    """The tensors that a folder holds, by name and on the meta device: nothing of them is read.

    Raises:
        CheckpointError: as of :func:`read_metadata`.
    """
    metadata = read_metadata(folder)
    return {
        ".".join(map(str, path[1:])): torch.empty(saved.size, dtype=saved.properties.dtype, device="meta")
        for name, saved in metadata.state_dict_metadata.items()
        if (path := _path(metadata, name))[0] == root and isinstance(saved, TensorStorageMetadata)
    }


def _memory(folder: Path, metadata: Metadata, like: Like, root: str) -> dict[str, Any]:
    """What to read, by the names of the table of contents."""
    wanted: dict[str, Any] = {}
    found = False
    for name, saved in metadata.state_dict_metadata.items():
        path = _path(metadata, name)
        if path[0] != root:
            continue
        found = True
        if isinstance(saved, BytesStorageMetadata):
            wanted[name] = io.BytesIO()
        elif not isinstance(saved, TensorStorageMetadata):
            raise CheckpointError(f"{folder}: {name} is neither a tensor nor a value.")
        elif (memory := like(path[1:], saved.size, saved.properties.dtype)) is not None:
            wanted[name] = memory
    if not found:
        raise CheckpointError(f"{folder} holds no {root}.")
    return wanted


def _path(metadata: Metadata, name: str) -> tuple[Any, ...]:
    """Where a value stood in the nested state that was saved."""
    known = (metadata.planner_data or {}).get(name)
    return tuple(known) if known else tuple(name.split(".", 1))


def _nested(flat: dict[tuple[Any, ...], Any]) -> Any:
    """Nested dictionaries, and lists where keys are numbers."""
    branches: dict[Any, dict[tuple[Any, ...], Any]] = {}
    for path, value in flat.items():
        if not path:
            return value
        branches.setdefault(path[0], {})[path[1:]] = value
    made = {key: _nested(branch) for key, branch in branches.items()}
    if made and all(isinstance(key, int) for key in made):
        return [made[key] for key in sorted(made)]
    return made


def _reason(error: BaseException) -> str:
    if isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    return " ".join(str(error).split())[:500] or type(error).__name__

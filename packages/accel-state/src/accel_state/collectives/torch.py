"""Collectives over torch.distributed (gloo, nccl, xccl, hccl, mpi, ...)."""

from __future__ import annotations

import json
import pickle
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from .._torch_compat import default_store
from ..errors import CollectiveTimeoutError
from .single import Collectives, ReduceOp

T = TypeVar("T")

# torch 2.13 renamed all_gather_into_tensor to all_gather_single, and warns about the old name.
_all_gather_flat: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


class TorchCollectives(Collectives):
    """Collectives over a process group.

    Args:
        device: device of the backend's tensors. Tensors on other devices are copied to it, and their results back.
        group: the participating processes, whose ranks are counted within the group; None for all processes.
    """

    def __init__(self, device: torch.device, group: dist.ProcessGroup | None = None) -> None:
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self.device = device
        self._group: dict[str, Any] = {} if group is None else {"group": group}

    def _call(self, operation: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        try:
            function(*args, **kwargs)
        except RuntimeError as error:
            raise explain(operation, self.rank, self.world_size, error) from error

    def _usable(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().to(self.device).contiguous()

    def barrier(self) -> None:
        on_device = {} if self.device.index is None else {"device_ids": [self.device.index]}
        self._call("barrier", dist.barrier, **on_device, **self._group)

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        local = self._usable(tensor)
        out = torch.empty((self.world_size, *tensor.shape), dtype=tensor.dtype, device=local.device)
        if local.numel():
            self._call("all_gather", _all_gather_flat, as_bytes(out), as_bytes(local), **self._group)
        return out.to(tensor.device)

    def all_gather_many(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        small, large = split_small(tensors)
        results: dict[int, torch.Tensor] = {i: self.all_gather(tensors[i]) for i in large}
        if small:
            members = [tensors[i].detach().to(self.device) for i in small]
            layout = ByteLayout(members)
            gathered = self.all_gather(layout.pack(members))
            for i, value in zip(small, layout.unpack(gathered, members), strict=True):
                results[i] = value.to(tensors[i].device)
        return [results[i] if i in results else self.all_gather(tensor) for i, tensor in enumerate(tensors)]

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> torch.Tensor:
        if tensor.numel() == 0:
            return tensor
        local = self._usable(tensor)
        self._call("all_reduce", dist.all_reduce, local, op=_OPS[op], **self._group)
        return _write_back(tensor, local)

    def all_reduce_many(self, tensors: Sequence[torch.Tensor], op: ReduceOp = "sum") -> list[torch.Tensor]:
        small, large = split_small(tensors)
        for i in large:
            self.all_reduce(tensors[i], op)
        for group in groups_by_dtype(tensors, small):
            flat = torch.cat([tensors[i].detach().to(self.device).reshape(-1) for i in group])
            self.all_reduce(flat, op)
            pieces = flat.split([tensors[i].numel() for i in group])
            for i, piece in zip(group, pieces, strict=True):
                _write_back(tensors[i], piece.view(tensors[i].shape))
        return list(tensors)

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        if tensor.numel() == 0:
            return tensor
        local = self._usable(tensor)
        source = dist.get_global_rank(self._group["group"], source) if self._group else source
        self._call("broadcast", dist.broadcast, as_bytes(local), src=source, **self._group)
        return _write_back(tensor, local)

    def broadcast_many(self, tensors: Sequence[torch.Tensor], source: int = 0) -> list[torch.Tensor]:
        small, large = split_small(tensors)
        for i in large:
            self.broadcast(tensors[i], source)
        if small:
            members = [tensors[i].detach().to(self.device) for i in small]
            layout = ByteLayout(members)
            buffer = self.broadcast(layout.pack(members), source)
            for i, value in zip(small, layout.unpack(buffer, members), strict=True):
                _write_back(tensors[i], value)
        return list(tensors)

    def all_gather_object(self, obj: T) -> list[T]:
        payload = _to_bytes(obj)
        sizes = self.all_gather(torch.tensor(payload.numel())).tolist()
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: payload.numel()] = payload
        rows = self.all_gather(padded)
        return [_from_bytes(row[:size]) for row, size in zip(rows, sizes, strict=True)]

    def broadcast_object(self, obj: T, source: int = 0) -> T:
        payload = _to_bytes(obj) if self.rank == source else torch.empty(0, dtype=torch.uint8)
        size = int(self.broadcast(torch.tensor(payload.numel()), source))
        if self.rank != source:
            payload = torch.empty(size, dtype=torch.uint8)
        self.broadcast(payload, source)
        if self.rank == source:
            return obj
        received: T = _from_bytes(payload)
        return received

    def shutdown(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group(**self._group)


def _write_back(tensor: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Copy a result into the caller's tensor, unless it shares its memory."""
    if values.data_ptr() != tensor.data_ptr() or values.device != tensor.device:
        with torch.no_grad():
            tensor.copy_(values)
    return tensor


def _to_bytes(obj: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(obj, protocol=pickle.HIGHEST_PROTOCOL)), dtype=torch.uint8)


def _from_bytes(tensor: torch.Tensor) -> Any:
    return pickle.loads(tensor.numpy().tobytes())


# Reinterpreting bytes as another dtype requires its alignment; 16 bytes suffice for complex128.
_ALIGNMENT = 16
# Above this size, copying into the buffer costs more than a separate message.
SMALL_BYTES = 1 << 18


def nbytes(tensor: torch.Tensor) -> int:
    """Size of the tensor's values in bytes."""
    return tensor.numel() * tensor.element_size()


def split_small(tensors: Sequence[torch.Tensor]) -> tuple[list[int], list[int]]:
    """Positions of the tensors to pack, and of those to send separately; empty tensors are in neither."""
    small = [i for i, tensor in enumerate(tensors) if 0 < nbytes(tensor) <= SMALL_BYTES]
    large = [i for i, tensor in enumerate(tensors) if nbytes(tensor) > SMALL_BYTES]
    if len(small) == 1:
        return [], sorted(large + small)
    return small, large


class ByteLayout:
    """The byte range of each tensor in a buffer, equal on all ranks for equal shapes and dtypes."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self.spans: list[tuple[int, int]] = []
        end = 0
        for tensor in tensors:
            start = -(-end // _ALIGNMENT) * _ALIGNMENT
            end = start + nbytes(tensor)
            self.spans.append((start, end))
        self.total = -(-end // _ALIGNMENT) * _ALIGNMENT

    def pack(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Copy the tensors into one uint8 tensor of ``total`` bytes."""
        buffer = torch.empty(self.total, dtype=torch.uint8, device=tensors[0].device)
        for tensor, (start, end) in zip(tensors, self.spans, strict=True):
            buffer[start:end].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        return buffer

    def unpack(self, buffer: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Split a buffer of shape ``(..., total)`` into tensors of shapes ``(..., *like[i].shape)``."""
        leading = buffer.shape[:-1]
        return [
            buffer[..., start:end].contiguous().view(tensor.dtype).view((*leading, *tensor.shape))
            for tensor, (start, end) in zip(like, self.spans, strict=True)
        ]


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A flat uint8 view of a contiguous tensor."""
    return tensor.reshape(-1).view(torch.uint8)


def groups_by_dtype(tensors: Sequence[torch.Tensor], positions: Iterable[int]) -> list[list[int]]:
    """Positions of tensors with the same dtype, which can be reduced as one."""
    groups: dict[torch.dtype, list[int]] = {}
    for i in positions:
        groups.setdefault(tensors[i].dtype, []).append(i)
    return list(groups.values())


# When one rank gives up, the connections of its peers break and they fail within milliseconds.
_GRACE_SECONDS = 5.0
_POLL_SECONDS = 0.05


def caller_location() -> str:
    """``file:line in function`` of the innermost frame outside accel and torch."""
    frame: FrameType | None = sys._getframe(1)
    outermost = frame
    while frame is not None:
        if not _is_internal(frame):
            return _describe(frame)
        outermost, frame = frame, frame.f_back
    return _describe(outermost) if outermost is not None else "an unknown location"


def _is_internal(frame: FrameType) -> bool:
    # By module name, not path: a user's project may be in a directory named accel.
    package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
    return package in ("accel", "torch", "contextlib", "functools") or package.startswith("accel_")


def _describe(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


def explain(operation: str, rank: int, world_size: int, error: RuntimeError) -> CollectiveTimeoutError:
    """Build the error of a collective that did not complete, with the ranks that arrived and where they wait."""
    here = f"{operation} at {caller_location()}"
    arrived = _exchange(here, rank, world_size)
    arrived[rank] = here
    missing = [r for r in range(world_size) if r not in arrived]
    lines = [f"{operation} did not complete on rank {rank} of {world_size}: {error}"]
    lines += [f"  rank {r} waits in {arrived[r]}" for r in sorted(arrived)]
    lines += [f"  rank {r} did not arrive (busy elsewhere, or exited)" for r in missing]
    lines.append(_advice(arrived, missing))
    return CollectiveTimeoutError("\n".join(lines))


def _advice(arrived: dict[int, str], missing: list[int]) -> str:
    if missing:
        ranks = ", ".join(str(r) for r in missing)
        return (
            f"Find out why rank {ranks} did not reach this line: an exception, a branch that only some ranks take, or "
            "work that takes longer than the timeout (InitProcessGroupKwargs(timeout=...))."
        )
    if len(set(arrived.values())) > 1:
        return "The ranks wait at different lines: every rank must call the same collectives in the same order."
    return (
        "All ranks wait at the same line: check the network, and that shapes agree (run with --debug or "
        "ACCELERATE_DEBUG_MODE=1)."
    )


def _exchange(here: str, rank: int, world_size: int) -> dict[int, str]:
    """Publish where this rank waits through the shared store, and collect the same from all others."""
    waiting: dict[int, str] = {}
    try:
        store = dist.PrefixStore("accel/stuck", default_store())
        store.set(str(rank), json.dumps(here))
        # Counted in polls, not by the clock: a machine that was suspended has not given the other ranks that time.
        for _ in range(round(_GRACE_SECONDS / _POLL_SECONDS)):
            for other in range(world_size):
                if other not in waiting and store.check([str(other)]):
                    waiting[other] = json.loads(store.get(str(other)))
            time.sleep(_POLL_SECONDS)
            if len(waiting) == world_size:
                break
    except (RuntimeError, ValueError) as error:
        # The rank that hosts the store may have exited first. Report what was collected until then.
        waiting.setdefault(rank, f"{here} (the store of the process group is unreachable: {error})")
    return waiting

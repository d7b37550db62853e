"""Collectives over torch.distributed (gloo, nccl, xccl, hccl, mpi, ...)."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from ..tensor_storage import memory_of
from . import packing
from .diagnosis import explain, is_lost
from .header import OBJECT_CALL, WIDTH, Schedule, schedule_of
from .single import Collectives, ReduceOp

T = TypeVar("T")

# torch 2.13 renamed all_gather_into_tensor to all_gather_single, and warns about the old name.
_all_gather_flat: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_SMALL = 8 * (WIDTH - 2)  # bytes of an object that fit into a header
_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


class TorchCollectives(Collectives):
    """Collectives over a process group.

    Args:
        device: device of the backend's tensors. Tensors on other devices are copied to it, and their results back.
        group: the participating processes, whose ranks are counted within the group; None for all processes.
    """

    def __init__(self, device: torch.device, group: dist.ProcessGroup | None = None) -> None:
        self.rank: int = dist.get_rank(group)
        self.world_size: int = dist.get_world_size(group)
        self.device = device
        self._group: dict[str, Any] = {} if group is None else {"group": group}
        every = cast("dist.ProcessGroup", group or dist.group.WORLD)
        self.schedule: Schedule | None = schedule_of(every, device.type == "cpu")

    def over(self, group: dist.ProcessGroup) -> TorchCollectives:
        return TorchCollectives(self.device, group)

    def _call(self, operation: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        try:
            function(*args, **kwargs)
        except RuntimeError as error:
            if not is_lost(error):
                raise  # of this rank alone, such as memory that ran out
            raise explain(operation, self.rank, self.world_size, error) from error

    def _usable(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().to(self.device).contiguous()

    def barrier(self) -> None:
        on_device = {} if self.device.index is None else {"device_ids": [self.device.index]}
        self._call("barrier", dist.barrier, **on_device, **self._group)

    def all_gather(self, tensor: torch.Tensor, operation: str = "all_gather") -> torch.Tensor:
        local = self._usable(tensor)
        out = torch.empty((self.world_size, *tensor.shape), dtype=tensor.dtype, device=local.device)
        if local.numel():
            self._call(operation, _all_gather_flat, packing.as_bytes(out), packing.as_bytes(local), **self._group)
        return out.to(tensor.device)

    def all_gather_many(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        small, large = packing.split_small(tensors)
        results: dict[int, torch.Tensor] = {i: self.all_gather(tensors[i]) for i in large}
        if small:
            members = [tensors[i].detach().to(self.device) for i in small]
            layout = packing.ByteLayout(members)
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
        small, large = packing.split_small(tensors)
        for i in large:
            self.all_reduce(tensors[i], op)
        for group in packing.groups_by_dtype(tensors, small):
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
        self._call("broadcast", dist.broadcast, packing.as_bytes(local), src=self._rank_in_world(source), **self._group)
        return _write_back(tensor, local)

    def _rank_in_world(self, rank: int) -> int:
        return dist.get_global_rank(self._group["group"], rank) if self._group else rank

    def broadcast_many(self, tensors: Sequence[torch.Tensor], source: int = 0) -> list[torch.Tensor]:
        small, large = packing.split_small(tensors)
        for i in large:
            self.broadcast(tensors[i], source)
        if small:
            members = [tensors[i].detach().to(self.device) for i in small]
            layout = packing.ByteLayout(members)
            buffer = self.broadcast(layout.pack(members), source)
            for i, value in zip(small, layout.unpack(buffer, members), strict=True):
                _write_back(tensors[i], value)
        return list(tensors)

    def scatter(self, tensor: torch.Tensor, parts: Sequence[torch.Tensor] | None, source: int = 0) -> torch.Tensor:
        local = self._usable(tensor)
        sent = None if parts is None else [packing.as_bytes(self._usable(part)) for part in parts]
        self._call("scatter", dist.scatter, packing.as_bytes(local), sent, self._rank_in_world(source), **self._group)
        return _write_back(tensor, local)

    def all_to_all(self, tensor: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        local = self._usable(tensor)
        received = local.new_empty(sum(sizes))
        parts = [local.numel() // self.world_size] * self.world_size
        self._call("all_to_all", dist.all_to_all_single, received, local, list(sizes), parts, **self._group)
        return received.to(tensor.device)

    def exchange(self, sent: Sequence[tuple[int, torch.Tensor]], received: Sequence[tuple[int, torch.Tensor]]) -> None:
        operations, arrived = [], []
        for rank, tensor in sent:
            content = packing.as_bytes(self._usable(tensor))
            operations.append(dist.P2POp(dist.isend, content, self._rank_in_world(rank), **self._group))
        for rank, tensor in received:
            local = self._usable(tensor)
            arrived.append((tensor, local))
            operations.append(dist.P2POp(dist.irecv, packing.as_bytes(local), self._rank_in_world(rank), **self._group))

        def wait() -> None:
            for request in dist.batch_isend_irecv(operations) if operations else ():
                request.wait()

        self._call("exchange", wait)
        for tensor, local in arrived:
            _write_back(tensor, local)

    def all_gather_object(self, obj: T) -> list[T]:
        payload = _to_bytes(obj)
        sizes, small = self._exchange_sizes(payload)
        return self._gather_payloads(payload, sizes) if small is None else small

    def _exchange_sizes(self, payload: torch.Tensor) -> tuple[list[int], list[Any] | None]:
        """Return the bytes of all ranks' objects, and the objects, if all fit into what is exchanged anyway."""
        rows = self.exchange_header(OBJECT_CALL, _header_of(payload).tolist())
        sizes = [row[0] for row in rows]
        return sizes, None if max(sizes) > _SMALL else [_small_object(torch.tensor(row)) for row in rows]

    def _gather_reports(self, report: T) -> list[T]:
        payload = _to_bytes(report)
        return self._gather_payloads(payload, self.all_gather(torch.tensor(payload.numel())).tolist())

    def _gather_payloads(self, payload: torch.Tensor, sizes: list[int]) -> list[Any]:
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: payload.numel()] = payload
        rows = self.all_gather(padded)
        return [_from_bytes(row[:size]) for row, size in zip(rows, sizes, strict=True)]

    def gather_object(self, obj: T, target: int = 0) -> list[T] | None:
        payload = _to_bytes(obj)
        sizes, small = self._exchange_sizes(payload)
        if small is not None:
            return small if self.rank == target else None
        if self.rank != target:
            self.exchange([(target, payload)], [])
            return None
        received = {rank: torch.empty(size, dtype=torch.uint8) for rank, size in enumerate(sizes) if rank != target}
        self.exchange([], list(received.items()))
        received[target] = payload
        return [_from_bytes(received[rank]) for rank in range(len(sizes))]

    def broadcast_object(self, obj: T, source: int = 0) -> T:
        payload = _to_bytes(obj) if self.rank == source else torch.empty(0, dtype=torch.uint8)
        header = self.broadcast(_header_of(payload), source)
        size = int(header[0])
        if size > _SMALL:
            payload = self.broadcast(payload if self.rank == source else torch.empty(size, dtype=torch.uint8), source)
        if self.rank == source:
            return obj
        received: T = _from_bytes(payload) if size > _SMALL else _small_object(header)
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


def _header_of(payload: torch.Tensor) -> torch.Tensor:
    """Return the size of an object in bytes, and the object if it is small."""
    small = torch.zeros(_SMALL, dtype=torch.uint8)
    if payload.numel() <= _SMALL:
        small[: payload.numel()] = payload
    return torch.cat((torch.tensor([payload.numel()]), small.view(torch.int64)))


def _small_object(header: torch.Tensor) -> Any:
    return _from_bytes(header[1:].view(torch.uint8)[: int(header[0])])


def _from_bytes(tensor: torch.Tensor) -> Any:
    return pickle.loads(memory_of(tensor.contiguous()))

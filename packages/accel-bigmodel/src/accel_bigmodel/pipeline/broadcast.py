"""Sends objects and tensors of rank 0 to all ranks without waiting for them."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from accel_state.collectives.packing import as_bytes

# Bytes of the length of an object, and of the message that begins with it. The structure of a batch fits in one.
_SIZE, _FIRST = 8, 2048


def transport_device(device: torch.device, group: dist.ProcessGroup | None = None) -> torch.device:
    """Return the device on which the communication backend expects its tensors."""
    return torch.device("cpu") if dist.get_backend(group) in ("gloo", "mpi", "fake") else device


def send_object(item: Any, device: torch.device) -> list[Any]:
    """Start to send an object from rank 0. Returns the operations to wait for."""
    data = pickle.dumps(item)
    data = len(data).to_bytes(_SIZE, "little") + data
    payload = torch.frombuffer(bytearray(data.ljust(_FIRST, b"\0")), dtype=torch.uint8).to(transport_device(device))
    return start_broadcast([payload[:_FIRST], payload[_FIRST:]])


def receive_object(device: torch.device) -> Any:
    """Return the object that rank 0 sends with :func:`send_object`."""
    first = torch.empty(_FIRST, dtype=torch.uint8, device=transport_device(device))
    wait_for(start_broadcast([first]))
    data = first.cpu().numpy().tobytes()
    length = int.from_bytes(data[:_SIZE], "little")
    rest = torch.empty(max(0, _SIZE + length - _FIRST), dtype=torch.uint8, device=first.device)
    wait_for(start_broadcast([rest]))
    return pickle.loads((data[_SIZE:] + rest.cpu().numpy().tobytes())[:length])


def start_broadcast(tensors: Sequence[torch.Tensor]) -> list[Any]:
    """Start to copy the tensors of rank 0 into those of the other ranks. Returns the operations to wait for before the
    tensors are read, changed or freed.
    """
    return [_Broadcast(tensor) for tensor in tensors if tensor.numel()]


def wait_for(operations: Sequence[Any]) -> None:
    """Wait until all operations are complete."""
    for operation in operations:
        operation.wait()


class _Broadcast:
    """A broadcast from rank 0 in progress, through host memory where the backend needs it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self._buffer = tensor.to(transport_device(tensor.device))
        self._work = dist.broadcast(as_bytes(self._buffer), src=0, async_op=True)

    def wait(self) -> None:
        self._work.wait()
        if self._buffer is not self._tensor:
            self._tensor.copy_(self._buffer)

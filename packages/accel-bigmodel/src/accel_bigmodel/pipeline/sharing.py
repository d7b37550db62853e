"""Telling all ranks what rank 0 has, without waiting for them."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from accel_state.collectives.packing import as_bytes


def channel(device: torch.device) -> torch.device:
    """Where the communication back end wants its tensors."""
    return torch.device("cpu") if dist.get_backend() in ("gloo", "mpi") else device


def send_object(item: Any, device: torch.device) -> list[Any]:
    """Start to tell the other ranks an object; called on rank 0.

    Returns:
        What to wait for.
    """
    payload = torch.frombuffer(bytearray(pickle.dumps(item)), dtype=torch.uint8).to(channel(device))
    return start_broadcast([torch.tensor([payload.numel()], device=payload.device), payload])


def receive_object(device: torch.device) -> Any:
    """The object that rank 0 sends."""
    size = torch.zeros(1, dtype=torch.int64, device=channel(device))
    _wait(start_broadcast([size]))
    payload = torch.empty(int(size), dtype=torch.uint8, device=size.device)
    _wait(start_broadcast([payload]))
    return pickle.loads(payload.cpu().numpy().tobytes())


def start_broadcast(tensors: Sequence[torch.Tensor]) -> list[Any]:
    """Start to send the tensors of rank 0 into those of the others, one after the other.

    Returns:
        What to wait for before the tensors are read, changed or let go.
    """
    return [_Broadcast(tensor) for tensor in tensors if tensor.numel()]


def _wait(works: Sequence[Any]) -> None:
    for work in works:
        work.wait()


class _Broadcast:
    """A broadcast from rank 0 that is under way; through host memory where the back end wants that."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self._carried = tensor.to(channel(tensor.device))
        self._work = dist.broadcast(as_bytes(self._carried), src=0, async_op=True)

    def wait(self) -> None:
        """Return when the tensor has been sent, or is there."""
        self._work.wait()
        if self._carried is not self._tensor:
            self._tensor.copy_(self._carried)

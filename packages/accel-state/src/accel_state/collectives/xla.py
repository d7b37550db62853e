"""Collectives over torch_xla."""

from __future__ import annotations

from typing import Any, TypeVar

import torch

from ..errors import require
from ..tensor_storage import memory_of
from .single import Collectives, ReduceOp
from .torch import _from_bytes, _to_bytes, _write_back

T = TypeVar("T")


class XlaCollectives(Collectives):
    """Collectives of torch_xla, for processes started by PJRT."""

    def __init__(self, device: torch.device) -> None:
        self._xm: Any = require(
            "torch_xla.core.xla_model", purpose="training on XLA devices", install="accel-state[xla]"
        )
        runtime = require("torch_xla.runtime", purpose="training on XLA devices", install="accel-state[xla]")
        self.world_size: int = int(runtime.world_size())
        self.rank: int = int(runtime.global_ordinal()) if self.world_size > 1 else 0
        self.device = device

    def barrier(self) -> None:
        self._xm.rendezvous("accel.barrier")

    def all_gather(self, tensor: torch.Tensor, operation: str = "all_gather") -> torch.Tensor:
        local = tensor.detach().to(self.device).unsqueeze(0)
        gathered: torch.Tensor = self._xm.all_gather(local, dim=0, pin_layout=False)
        return gathered.to(tensor.device)

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> torch.Tensor:
        reduced = self._xm.all_reduce(op, tensor.detach().to(self.device))
        return _write_back(tensor, reduced)

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        local = tensor.detach().to(self.device)
        # XLA has no broadcast: sum the values of the source and zeros of all other ranks.
        contribution = local if self.rank == source else torch.zeros_like(local)
        summed = self._xm.all_reduce(
            "sum", contribution.to(torch.int32 if tensor.dtype == torch.bool else tensor.dtype)
        )
        return _write_back(tensor, summed.to(tensor.dtype))

    def all_gather_object(self, obj: T) -> list[T]:
        payloads = self._xm.rendezvous("accel.all_gather_object", memory_of(_to_bytes(obj)).tobytes())
        return [_from_bytes(torch.frombuffer(bytearray(payload), dtype=torch.uint8)) for payload in payloads]

    def broadcast_object(self, obj: T, source: int = 0) -> T:
        return self.all_gather_object(obj)[source]

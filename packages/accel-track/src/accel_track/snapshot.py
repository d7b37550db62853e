"""Copies of logged values, at a cost that a training loop does not notice.

Numbers and strings are immutable, but an optimizer or the next batch may overwrite a tensor right after the call.
A single number in host memory is read, which takes less than a microsecond; all other tensors of one device, dtype and
shape are copied by one operation on their device. A device only enqueues that operation, and the thread that delivers
the values waits for it later.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import torch

from accel_state import devices
from accel_state.errors import ConfigurationError

from .serialize import to_plain

_IMMUTABLE = frozenset({float, int, str, bool, type(None), bytes, complex})


class _Scalar:
    """A tensor of one element in host memory."""

    __slots__ = ("dtype", "shape", "value")

    def __init__(self, tensor: torch.Tensor) -> None:
        # Unlike item(), tolist() keeps the GIL, which a delivering thread might otherwise take for milliseconds.
        value = tensor.tolist()
        while type(value) is list:
            value = value[0]
        self.value, self.dtype, self.shape = value, tensor.dtype, tensor.shape

    def restore(self) -> torch.Tensor:
        return torch.tensor(self.value, dtype=self.dtype, device="cpu").reshape(self.shape)


class _Member:
    """A tensor in a group's copy."""

    __slots__ = ("group", "index")

    def __init__(self, group: _Group, index: int) -> None:
        self.group, self.index = group, index

    def restore(self) -> torch.Tensor:
        return self.group.host[self.index]


class _Group:
    """Tensors of one device, dtype and shape, copied by one operation."""

    __slots__ = ("copied", "host", "members", "ready")

    def __init__(self) -> None:
        self.members: list[torch.Tensor] = []
        self.host: Any = None
        self.ready: Any = None

    def add(self, tensor: torch.Tensor) -> _Member:
        self.members.append(tensor)
        return _Member(self, len(self.members) - 1)

    def copy(self) -> None:
        """Enqueue the copy on the device."""
        self.copied = torch.stack(self.members) if len(self.members) > 1 else self.members[0].clone().unsqueeze(0)
        self.members = []
        known = devices.of(self.copied.device)
        module = None if known is None else known.streams()
        if module is not None:
            self.ready = module.Event()
            self.ready.record(module.current_stream(self.copied.device))

    def fetch(self) -> None:
        """Move the copy to host memory without waiting for operations enqueued after it."""
        if self.ready is None:
            self.host = self.copied.cpu()
        else:
            device = self.copied.device
            module: Any = getattr(torch, device.type)
            stream = module.Stream(device)
            with module.stream(stream):
                stream.wait_event(self.ready)
                self.host = self.copied.cpu()
        del self.copied


class Snapshot:
    """Values at the time of a call. Containers, tensors and arrays are copied; other objects are not."""

    __slots__ = ("_fetched", "_groups", "_lock", "_values")

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._groups: dict[Any, _Group] = {}
        self._lock: Any = None
        self._fetched = True
        copies: dict[str, Any] = {}
        for name, value in values.items():
            key = name if type(name) is str else str(name)
            copies[key] = value if type(value) in _IMMUTABLE else self._copy(value)
        self._values = copies
        if self._groups:
            with torch.no_grad():
                for group in self._groups.values():
                    group.copy()
        if not self._fetched:
            self._lock = threading.Lock()

    def _copy(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if value.is_meta:
                return to_plain(value)  # has no data
            self._fetched = False
            if not value.is_cpu or value.numel() != 1 or hasattr(value, "placements"):
                return self._copy_tensor(value)
            is_dense = value.layout is torch.strided and not value.is_quantized
            return _Scalar(value) if is_dense else self._copy_tensor(value)
        if isinstance(value, dict):
            return {key: self._copy(item) for key, item in value.items()}
        if type(value) in (list, tuple):
            return type(value)([self._copy(item) for item in value])
        # numpy need not be installed.
        return value.copy() if type(value).__name__ == "ndarray" and type(value).__module__ == "numpy" else value

    def _copy_tensor(self, tensor: torch.Tensor) -> Any:
        if hasattr(tensor, "placements"):
            tensor = _local_tensor(tensor)
        key = (tensor.device, tensor.dtype, tensor.shape) if tensor.layout is torch.strided else id(tensor)
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = _Group()
        return group.add(tensor.detach())

    def values(self) -> dict[str, Any]:
        """Return a new dictionary of the values, with every tensor in host memory. Thread-safe."""
        if not self._fetched:
            with self._lock:
                if not self._fetched:
                    for group in self._groups.values():
                        group.fetch()
                    self._values = _restored(self._values)
                    self._fetched = True
        return dict(self._values)


def _local_tensor(tensor: Any) -> torch.Tensor:
    """Return the local tensor of a replicated DTensor."""
    if all(placement.is_replicate() for placement in tensor.placements):
        local: torch.Tensor = tensor.to_local()
        return local
    raise ConfigurationError(
        f"a tensor of shape {tuple(tensor.shape)} is sharded over processes ({tensor.placements}), and log() is not a "
        "collective operation. Log tensor.full_tensor(), computed on every rank."
    )


def _restored(value: Any) -> Any:
    if isinstance(value, (_Scalar, _Member)):
        return value.restore()
    if isinstance(value, dict):
        return {key: _restored(item) for key, item in value.items()}
    return type(value)([_restored(item) for item in value]) if type(value) in (list, tuple) else value

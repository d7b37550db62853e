"""Logged values as they are at the time of the call, at a cost that a training loop does not notice.

Numbers and texts cannot change. A tensor can, right after the call: an optimizer or the next batch writes into it. So
its value is kept: a single number in host memory is read, which takes less than a microsecond; all others of one
device, type and shape are copied by one operation, where they are. A device only queues that operation. Whoever
delivers the values waits for it later, in a thread of its own.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping
from typing import Any

import torch

from accel_state.errors import ConfigurationError

from .serialize import to_plain

_UNCHANGING = frozenset({float, int, str, bool, type(None), bytes, complex})


class _Scalar:
    """A tensor of one element in host memory, to be made again when somebody wants it."""

    __slots__ = ("dtype", "shape", "value")

    def __init__(self, tensor: torch.Tensor) -> None:
        # Unlike item(), this keeps the interpreter's lock, which a delivering thread might hold for milliseconds before
        # it is given back.
        value = tensor.tolist()
        while type(value) is list:
            value = value[0]
        self.value, self.dtype, self.shape = value, tensor.dtype, tensor.shape

    def restore(self) -> torch.Tensor:
        return torch.tensor(self.value, dtype=self.dtype, device="cpu").reshape(self.shape)


class _Member:
    """A tensor that is part of a group's copy."""

    __slots__ = ("group", "index")

    def __init__(self, group: _Group, index: int) -> None:
        self.group, self.index = group, index

    def restore(self) -> torch.Tensor:
        return self.group.host[self.index]


class _Group:
    """Tensors of one device, type and shape, copied by one operation."""

    __slots__ = ("copied", "host", "members", "ready")

    def __init__(self) -> None:
        self.members: list[torch.Tensor] = []
        self.host: Any = None
        self.ready: Any = None

    def add(self, tensor: torch.Tensor) -> _Member:
        self.members.append(tensor)
        return _Member(self, len(self.members) - 1)

    def copy(self) -> None:
        """Queue the copy on the device."""
        self.copied = torch.stack(self.members) if len(self.members) > 1 else self.members[0].clone().unsqueeze(0)
        self.members = []
        module: Any = getattr(torch, self.copied.device.type, None)
        if self.copied.device.type != "cpu" and hasattr(module, "Event") and hasattr(module, "current_stream"):
            self.ready = module.Event()
            self.ready.record(module.current_stream(self.copied.device))

    def fetch(self) -> None:
        """Bring the copy to host memory. Waits for nothing that the script queued after it."""
        with self._after_copy():
            self.host = self.copied.cpu()
        del self.copied

    @contextlib.contextmanager
    def _after_copy(self) -> Any:
        if self.ready is None:
            yield
            return
        device = self.copied.device
        module: Any = getattr(torch, device.type)
        stream = module.Stream(device)
        with module.stream(stream):
            stream.wait_event(self.ready)
            yield


class Snapshot:
    """Values at the time of a call.

    Args:
        values: names to anything. Containers are copied, tensors and arrays too; other objects are kept as they are.

    Raises:
        ConfigurationError: a tensor that is spread over processes.
    """

    __slots__ = ("_fetched", "_groups", "_lock", "_values")

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._groups: dict[Any, _Group] = {}
        self._lock: Any = None
        self._fetched = True
        kept: dict[str, Any] = {}
        for name, value in values.items():
            kept[name if type(name) is str else str(name)] = value if type(value) in _UNCHANGING else self._keep(value)
        self._values = kept
        if self._groups:
            with torch.no_grad():
                for group in self._groups.values():
                    group.copy()
        if not self._fetched:
            self._lock = threading.Lock()

    def _keep(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if value.is_meta:
                return to_plain(value)  # there is no value to fetch
            self._fetched = False
            if (
                value.is_cpu
                and not hasattr(value, "placements")
                and value.numel() == 1
                and value.layout is torch.strided
                and not value.is_quantized
            ):
                return _Scalar(value)
            return self._keep_tensor(value)
        if isinstance(value, dict):
            return {key: self._keep(item) for key, item in value.items()}
        if type(value) in (list, tuple):
            return type(value)([self._keep(item) for item in value])
        # Arrays of numpy, which need not be installed.
        return value.copy() if type(value).__name__ == "ndarray" and type(value).__module__ == "numpy" else value

    def _keep_tensor(self, tensor: torch.Tensor) -> Any:
        if hasattr(tensor, "placements"):
            tensor = _whole(tensor)
        key = (tensor.device, tensor.dtype, tensor.shape) if tensor.layout is torch.strided else id(tensor)
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = _Group()
        return group.add(tensor.detach())

    def values(self) -> dict[str, Any]:
        """The values, with every tensor in host memory; a dictionary of the caller's own. Any thread may ask, also
        several at once.
        """
        if not self._fetched:
            with self._lock:
                if not self._fetched:
                    for group in self._groups.values():
                        group.fetch()
                    self._values = _restored(self._values)
                    self._fetched = True
        return dict(self._values)


def _whole(tensor: Any) -> torch.Tensor:
    """A tensor of a mesh of devices as one of this process, which is possible if every process has all of it."""
    if all(placement.is_replicate() for placement in tensor.placements):
        local: torch.Tensor = tensor.to_local()
        return local
    raise ConfigurationError(
        f"a tensor of shape {tuple(tensor.shape)} is spread over processes ({tensor.placements}), and log() is no "
        "collective operation. "
        "Log tensor.full_tensor(), computed on every rank."
    )


def _restored(value: Any) -> Any:
    if isinstance(value, (_Scalar, _Member)):
        return value.restore()
    if isinstance(value, dict):
        return {key: _restored(item) for key, item in value.items()}
    return type(value)([_restored(item) for item in value]) if type(value) in (list, tuple) else value

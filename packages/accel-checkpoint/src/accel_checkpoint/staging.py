"""Copies of a state in host memory, from which it can be written while training continues."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from accel_state import devices
from accel_state.tensor_storage import id_tensor_storage

from .shared_memory import SharedMemory, is_plain, tensor_in, view_of

StorageKey = tuple[torch.device, int, int]


class HostCopies:
    """Copies nested states into host memory.

    Args:
        memory: where; it is kept, because fresh memory takes several times longer. None takes memory for each copy.
    """

    def __init__(self, memory: SharedMemory | None = None) -> None:
        self.memory = memory
        self._allocate: Callable[[int], torch.UntypedStorage] = (
            torch.UntypedStorage if memory is None else memory.allocate
        )

    def copy(self, value: Any) -> Any:
        storages: dict[StorageKey, torch.UntypedStorage] = {}
        without_storage: dict[StorageKey, torch.Tensor] = {}
        memo: dict[int, Any] = {}
        for tensor in _tensors(value):
            if not _has_storage(tensor):
                key = id_tensor_storage(tensor)
                if key not in without_storage:
                    without_storage[key] = tensor.detach().cpu()
                memo[id(tensor)] = without_storage[key]
            elif is_plain(tensor):
                memo[id(tensor)] = self._copy_tensor(tensor, storages)
            elif tensor.device.type not in ("cpu", "meta"):
                # Copied by its class. deepcopy would copy it on its device, where the thread that reads the copy is not
                # ordered after the stream that writes it.
                memo[id(tensor)] = _to_host(tensor, memo)
        return copy.deepcopy(value, memo)

    def _copy_tensor(self, tensor: torch.Tensor, storages: dict[StorageKey, torch.UntypedStorage]) -> torch.Tensor:
        original = tensor.untyped_storage()
        key = original.device, original.data_ptr(), original.nbytes()
        if key not in storages:
            storages[key] = self._allocate(original.nbytes())
            target = storages[key]
            if original.device.type == "cpu" and original.nbytes() % 8 == 0:
                # torch copies bytes one by one, a tenth slower.
                words, copied = (torch.empty(0, dtype=torch.int64).set_(one) for one in (original, target))
                copied.copy_(words)
            else:
                target.copy_(original)
        return tensor_in(storages[key], *view_of(tensor))


def _to_host(tensor: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
    moved = tensor.detach().cpu()
    attributes = {name: item for name, item in vars(tensor).items() if name not in vars(moved)}
    vars(moved).update(copy.deepcopy(attributes, memo))
    if isinstance(tensor, nn.Parameter) and type(moved) is torch.Tensor:
        return nn.Parameter(moved, requires_grad=tensor.requires_grad)
    return moved.requires_grad_(tensor.requires_grad)


def on_host(value: Any) -> Any:
    """Return a nested state with its tensors in host memory; the given one if they all are."""
    if all(tensor.device.type == "cpu" for tensor in _tensors(value)):
        return value
    return HostCopies().copy(value)


def without_unsavable(value: Any) -> Any:
    """Return a nested state that torch can save for any machine: tensors without a storage are copied to the host."""
    return value if all(map(_has_storage, _tensors(value))) else HostCopies().copy(value)


def _has_storage(tensor: torch.Tensor) -> bool:
    device = devices.of(tensor.device)
    return device is None or device.has_storage


def _tensors(value: Any, seen: set[int] | None = None) -> Iterator[torch.Tensor]:
    seen = set() if seen is None else seen
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple)) and id(value) not in seen:
        seen.add(id(value))
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item, seen)

"""Copies of a state in host memory, from which it can be written while training goes on."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from .._torch_compat import neg_view

StorageKey = tuple[torch.device, int, int]


class HostCopies:
    """Copies nested states into host memory that is kept for the next time.

    What shares memory in the original shares it in the copy, so that a file of the copy has the same bytes. Memory that
    the operating system has to find and clear first costs several times more than the copying, so it is kept; it is one
    copy of the state.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[torch.UntypedStorage]] = {}
        self._used: list[torch.UntypedStorage] = []

    def start(self) -> None:
        """Begin a new state. The copies of the last one may be overwritten from now on."""
        for storage in self._used:
            self._free.setdefault(storage.nbytes(), []).append(storage)
        self._used.clear()

    def finish(self) -> None:
        """The state is copied: give back memory that it did not need."""
        self._free.clear()

    def copy(self, value: Any) -> Any:
        """A copy of nested containers, tensors, and other objects, that has nothing in common with the original."""
        storages: dict[StorageKey, torch.UntypedStorage] = {}
        memo = {id(tensor): self._copy_tensor(tensor, storages) for tensor in _tensors(value) if _is_plain(tensor)}
        return copy.deepcopy(value, memo)

    def _copy_tensor(self, tensor: torch.Tensor, storages: dict[StorageKey, torch.UntypedStorage]) -> torch.Tensor:
        original = tensor.untyped_storage()
        key = original.device, original.data_ptr(), original.nbytes()
        if key not in storages:
            storages[key] = self._copy_storage(original)
        storage = storages[key]
        copied = torch.empty(0, dtype=tensor.dtype).set_(
            storage, tensor.storage_offset(), tensor.size(), tensor.stride()
        )
        # These two are marks on the tensor: the memory holds the values before them.
        copied = copied.conj() if tensor.is_conj() else copied
        copied = neg_view(copied) if tensor.is_neg() else copied
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(copied, requires_grad=tensor.requires_grad)
        return copied.requires_grad_(tensor.requires_grad)

    def _copy_storage(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        kept = self._free.get(storage.nbytes())
        target = kept.pop() if kept else torch.UntypedStorage(storage.nbytes())
        target.copy_(storage)
        self._used.append(target)
        return target


def on_host(value: Any) -> Any:
    """The same nested state with its tensors in host memory; those that are there already are not copied."""
    elsewhere = [tensor for tensor in _tensors(value) if tensor.device.type != "cpu"]
    return HostCopies().copy(value) if elsewhere else value


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is made of a storage, offset, size and stride alone; others copy themselves."""
    if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.layout != torch.strided or tensor.is_quantized:
        return False
    return tensor.device.type != "meta" and not vars(tensor)


def _tensors(value: Any, seen: set[int] | None = None) -> Iterator[torch.Tensor]:
    seen = set() if seen is None else seen
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple)) and id(value) not in seen:
        seen.add(id(value))
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item, seen)

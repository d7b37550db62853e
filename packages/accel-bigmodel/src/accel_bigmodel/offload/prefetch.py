"""Fetching the next offloaded weights while the current ones are computed with."""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from accel_state import devices

from .store import OffloadedWeightsLoader

_PAGE = 4096
# The weights by name, and the stream event to wait for before using them on an accelerator.
_Fetched = tuple[dict[str, torch.Tensor], Any]


@dataclass
class WeightGroup:
    """The offloaded weights that one hook needs for a forward."""

    names: list[str]  # names of the weights, from the hook's module on
    source: Mapping[str, torch.Tensor]  # the mapping that holds them
    source_names: list[str]  # their names in it
    nbytes: int  # their size
    device: torch.device | None  # where they are needed. None: where they are
    is_lookup_table: bool  # few of their rows are used, so mapped pages are not read in advance


class Prefetcher:
    """Fetches the weights of a model's hooks in a thread, in the order in which they will be needed.

    The order is that of the last forward; before the first one, that of the model. Besides the weights in use it holds
    at most one more group, or as many as fit into the size of the largest group. Requests out of order are served at
    once.
    """

    def __init__(self, groups: Sequence[WeightGroup]) -> None:
        self._groups = list(groups)
        self._window = max((group.nbytes for group in groups), default=0)
        self._next = [*range(1, len(groups)), -1]
        self._reset()
        _PREFETCHERS.add(self)

    def _reset(self) -> None:
        self._last = -1
        self._ready: dict[int, Future[_Fetched]] = {}
        self._executor: ThreadPoolExecutor | None = None
        self._streams: dict[torch.device, Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {"_groups": self._groups, "_window": self._window, "_next": self._next}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()
        _PREFETCHERS.add(self)

    def take(self, index: int, device: torch.device | None) -> dict[str, torch.Tensor]:
        """The weights of a group, on ``device``; starts fetching the groups that come next."""
        group = self._groups[index]
        if group.device != device:
            group.device = device
            self._ready.pop(index, None)
        future = self._ready.pop(index, None)
        if future is None:
            self.cancel()  # what was fetched follows another order
            values, arrival = self._fetch(index)
        else:
            values, arrival = future.result()
        # The step from the last group to the first is not learned: fetching it would keep memory between forwards.
        if self._last >= 0 and index > 0:
            self._next[self._last] = index
        self._last = index
        self._fetch_next(index)
        if arrival is not None and device is not None:
            stream = devices.get(device.type).module.current_stream(device)
            stream.wait_event(arrival)
            for value in values.values():
                value.record_stream(stream)
        return values

    def cancel(self) -> None:
        """Release what was fetched ahead."""
        self._ready.clear()

    def _fetch_next(self, current: int) -> None:
        nbytes, index = 0, self._next[current]
        visited = {current}
        while index >= 0 and index not in visited:
            visited.add(index)
            nbytes += self._groups[index].nbytes
            if nbytes > self._window and len(visited) > 2:
                return
            if index not in self._ready:
                if self._executor is None:
                    self._executor = ThreadPoolExecutor(1, thread_name_prefix="accel-prefetch")
                # A weak reference, so that the thread ends when the model is released.
                self._ready[index] = self._executor.submit(_fetch_for, weakref.ref(self), index)
            index = self._next[index]

    def _fetch(self, index: int) -> _Fetched:
        group = self._groups[index]
        values = {}
        for name, source_name in zip(group.names, group.source_names, strict=True):
            values[name] = _read(group.source, source_name, group.is_lookup_table)
        if group.device is None or group.device.type == "cpu":
            return values, None
        device_type = devices.get(group.device.type) if group.device.type in devices.names() else None
        if device_type is None or not hasattr(device_type.module, "Stream"):
            return {name: value.to(group.device) for name, value in values.items()}, None
        if group.device not in self._streams:
            self._streams[group.device] = device_type.module.Stream(device=group.device)
        with device_type.module.stream(self._streams[group.device]):
            sent = {name: _pinned(value).to(group.device, non_blocking=True) for name, value in values.items()}
            arrival = device_type.module.Event()
            arrival.record(self._streams[group.device])
        return sent, arrival


_PREFETCHERS: weakref.WeakSet[Prefetcher] = weakref.WeakSet()


def _reset_after_fork() -> None:
    """Forget the threads, which exist only in the parent process."""
    for prefetcher in _PREFETCHERS:
        prefetcher._reset()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_after_fork)


def _fetch_for(owner: weakref.ref[Prefetcher], index: int) -> _Fetched:
    prefetcher = owner()
    return ({}, None) if prefetcher is None else prefetcher._fetch(index)


def _read(source: Mapping[str, torch.Tensor], name: str, is_lookup_table: bool) -> torch.Tensor:
    if is_lookup_table or not isinstance(source, OffloadedWeightsLoader) or name in source.state_dict:
        return source[name]
    source.read_ahead(name)
    value = source[name]
    if value.is_contiguous() and value.numel():
        # Reading a byte of each page here makes the disk work before the forward does.
        value.detach().reshape(-1).view(torch.uint8)[::_PAGE].sum()
    return value


def _pinned(value: torch.Tensor) -> torch.Tensor:
    return value if value.device.type != "cpu" or value.is_pinned() else value.contiguous().pin_memory()

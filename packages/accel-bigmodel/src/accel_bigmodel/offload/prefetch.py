"""Fetching the next offloaded weights while the current ones are computed with."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch

from .staging import StagedCopies
from .store import OffloadedWeightsLoader, Origin, are_same, origins

# How many groups after the current one are considered for fetching.
_LOOK_AHEAD = 32


@dataclass
class _Fetched:
    """The weights of a group."""

    values: dict[str, torch.Tensor]
    arrival: Any  # the event of their arrival on an accelerator
    origins: list[Origin]  # what they were read from


@dataclass
class WeightGroup:
    """The offloaded weights that one hook needs for a forward."""

    names: list[str]  # names of the weights, from the hook's module on
    source: Mapping[str, torch.Tensor]  # the mapping that holds them
    source_names: list[str]  # their names in it
    nbytes: int  # their size
    device: torch.device | None  # where they are needed. None: where they are
    is_lookup_table: bool  # few of their rows are used, so mapped pages are not read in advance

    @property
    def held_bytes(self) -> int:
        """Bytes that the weights take once they are fetched."""
        return 0 if self.is_lookup_table and _is_host(self.device) else self.nbytes

    def is_mapped(self) -> bool:
        """Return True if all weights are used where they are in mapped files."""
        source = self.source
        if not _is_host(self.device) or not isinstance(source, OffloadedWeightsLoader):
            return False
        return all(source.is_mapped(name) for name in self.source_names)


class Prefetcher:
    """Fetches the weights of a model's hooks in a thread, in the order in which they will be needed.

    The order is that of the last forward; before the first one, that of the model. Requests out of order are served at
    once. Mapped weights stay mapped between forwards, as many as there is room for, because mapping their pages anew
    can take longer than computing with them. Which ones is fixed: of weights used in a circle, those used least
    recently are the next ones.

    Args:
        groups: the weights of each hook.
        room: bytes for weights in use, fetched ahead, and kept mapped. None: twice the largest group, and none kept.
    """

    def __init__(self, groups: Sequence[WeightGroup], room: int | None = None) -> None:
        self._groups = list(groups)
        self._largest = max((group.held_bytes for group in groups), default=0)
        self.room: int = 2 * self._largest if room is None else min(room, 2 * self._largest)
        """Bytes for weights in use and those fetched ahead."""
        self._keep: set[int] = set()
        spare = (room or 0) - self.room
        for index, group in enumerate(groups):
            if group.held_bytes <= spare and group.is_mapped():
                self._keep.add(index)
                spare -= group.held_bytes
        self._next = [*range(1, len(groups)), -1]
        self._reset()
        _PREFETCHERS.add(self)

    def _reset(self) -> None:
        self._lock = threading.Lock()  # for the tables, never while weights are read
        self._place = threading.local()  # of each thread that runs the model: the group that it used last
        self._kept: dict[int, _Fetched] = {}
        self._ready: dict[int, Future[_Fetched]] = {}
        self._wanted_by: dict[int, int] = {}  # the thread for which a group is fetched
        self._executor: ThreadPoolExecutor | None = None
        self._staging: dict[torch.device, StagedCopies] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("_groups", "_largest", "room", "_keep", "_next")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()
        _PREFETCHERS.add(self)

    def set_group(self, index: int, group: WeightGroup) -> None:
        """Take the weights of a hook from another place from now on."""
        with self._lock:
            self._groups[index] = group
            self._ready.pop(index, None)
            self._keep.discard(index)
            self._kept.pop(index, None)

    def take(self, index: int, device: torch.device | None) -> dict[str, torch.Tensor]:
        """Return the weights of a group, on ``device``; start fetching the groups that come next."""
        group = self._groups[index]
        if group.device != device:
            self.set_group(index, replace(group, device=device))
        fetched = self._fetched(index)
        self.skip(index)
        staging = None if device is None else self._staging.get(device)
        earlier = None if staging is None else staging.receive(fetched.values, fetched.arrival)
        if len(self._kept) < len(self._groups):
            self._fetch_next(index, earlier)
        return fetched.values

    def skip(self, index: int) -> None:
        """Note that this thread uses a group now."""
        last = self._last()
        # The step from the last group to the first is not learned: fetching it would keep memory between forwards.
        if last >= 0 and index > 0:
            self._next[last] = index
        self._place.last = index

    def _last(self) -> int:
        last: int = getattr(self._place, "last", -1)
        return last

    def _fetched(self, index: int) -> _Fetched:
        """Return the weights of a group as its source holds them now: kept, fetched ahead, or fetched here."""
        group, last = self._groups[index], self._last()
        present = origins(group.source, group.source_names)
        with self._lock:
            kept = self._kept.get(index)
            if kept is not None and are_same(kept.origins, present):
                was_written = any(value._version for value in kept.values.values())  # by a forward
                if not was_written:
                    return kept
            future = self._ready.pop(index, None)
        fetched = None
        if future is not None:
            fetched = future.result()
        elif last < 0 or self._next[last] != index:
            self.cancel()  # what was fetched follows another order
        if fetched is None or not are_same(fetched.origins, present):
            fetched = self._fetch(index)
        if index in self._keep:
            with self._lock:
                self._kept[index] = fetched
        return fetched

    def cancel(self, everything: bool = False) -> None:
        """Release what was fetched ahead for this thread, or for all."""
        me = threading.get_ident()
        with self._lock:
            for index in [key for key in self._ready if everything or self._wanted_by.get(key) == me]:
                self._ready.pop(index).cancel()

    def _fetch_next(self, current: int, earlier: Any) -> None:
        with self._lock:
            held, index = self._groups[current].held_bytes, current
            for _ in range(_LOOK_AHEAD):
                index = self._next[index]
                if index < 0 or index == current:
                    return
                if index in self._kept:
                    continue
                held += self._groups[index].held_bytes
                if held > self.room:
                    return
                if index not in self._ready:
                    if self._executor is None:
                        self._executor = ThreadPoolExecutor(1, thread_name_prefix="accel-prefetch")
                    # A weak reference, so that the thread ends when the model is released.
                    self._ready[index] = self._executor.submit(_fetch_for, weakref.ref(self), index, earlier)
                    self._wanted_by[index] = threading.get_ident()

    def _fetch(self, index: int) -> _Fetched:
        group = self._groups[index]
        read_from = origins(group.source, group.source_names)
        if isinstance(group.source, OffloadedWeightsLoader):
            # Weights that are kept may be used in another mode than this.
            with torch.inference_mode(False):
                found = group.source.read_many(group.source_names, read_now=not group.is_lookup_table)
        else:
            found = {name: group.source[name] for name in group.source_names}
        values = {name: found[source] for name, source in zip(group.names, group.source_names, strict=True)}
        if group.device is None or _is_host(group.device):
            return _Fetched(values, None, read_from)
        with self._lock:
            if group.device not in self._staging:
                self._staging[group.device] = StagedCopies(group.device, self._largest)
            staging = self._staging[group.device]
        return _Fetched(*staging.send(values), read_from)


def _is_host(device: torch.device | None) -> bool:
    """Return True if weights are used where they are in host memory, or in a mapped file."""
    return device is None or device.type == "cpu"


_PREFETCHERS: weakref.WeakSet[Prefetcher] = weakref.WeakSet()


def _reset_after_fork() -> None:
    """Forget the threads, which exist only in the parent process."""
    for prefetcher in _PREFETCHERS:
        prefetcher._reset()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_after_fork)


def _fetch_for(owner: weakref.ref[Prefetcher], index: int, earlier: Any) -> _Fetched:
    if earlier is not None:
        # Weights that are not used any more are released on the device before more are copied there. Otherwise a host
        # that is ahead of its device would copy the whole model.
        earlier.synchronize()
    prefetcher = owner()
    return _Fetched({}, None, []) if prefetcher is None else prefetcher._fetch(index)

"""Fetching the next offloaded weights while the present ones are computed with."""

from __future__ import annotations

import functools
import itertools
import os
import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch import nn

from accel_state import devices

from ..hooks.align import AlignDevicesHook
from ..hooks.attach import align_hooks
from .alignment import HALF, aligned, indifferent, is_product, single_row
from .host_buffer_pool import BufferPool
from .store import OffloadedWeightsLoader

_PAGE = 4096
_Values = dict[str, torch.Tensor]
# ... and what to wait for before they are used on an accelerator: an event of its stream.
_Fetched = tuple[_Values, Any]


class ReadAhead:
    """Fetches weights for the hooks of a model, in the order in which they will be asked for.

    The order is that of the last forward; before the first one, that of the model. Beside the weights in use it holds
    at most one more hook's, and further ones as long as they fit into ``window`` bytes together. Who asks out of order
    is served at once.

    Args:
        hooks: the hooks with offloaded weights, in the order of the model.
        modules: their modules.
        window: bytes. None: the largest weights of one hook.
    """

    def __init__(
        self, hooks: Sequence[AlignDevicesHook], modules: Sequence[nn.Module], window: int | None = None
    ) -> None:
        self._sizes = [sum(slot.nbytes for slot in hook.slots) for hook in hooks]
        largest = max(self._sizes, default=0)
        self.window = largest if window is None else window
        self.pool = BufferPool(2 * largest)
        self._sources = [hook.source() for hook in hooks]
        self._names = [[slot.name for slot in hook.slots] for hook in hooks]
        self._hooks = list(hooks)
        # A lookup in a table touches few of its rows: of a mapped table only those are read.
        self._sparse = [isinstance(module, (nn.Embedding, nn.EmbeddingBag)) for module in modules]
        self._modules = list(modules)
        types = [{slot.resting.dtype for slot in hook.slots} for hook in hooks]
        self._indifferent = [
            all(indifferent(module, dtype) for dtype in own) for module, own in zip(modules, types, strict=True)
        ]
        self._halves = [own <= HALF for own in types]
        self._rows_are_single = False
        self._ranks = {id(hook): rank for rank, hook in enumerate(hooks)}
        self._next = [*range(1, len(hooks)), -1]
        self._last = -1
        self._ready: dict[int, Future[_Fetched]] = {}
        self._worker: _Worker | None = None
        self._streams: dict[torch.device, Any] = {}
        for hook in hooks:
            hook.read_ahead = self

    def __getstate__(self) -> dict[str, Any]:
        # What is under way stays with the original.
        return {**self.__dict__, "_ready": {}, "_worker": None, "_streams": {}, "_last": -1, "_ranks": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def take(self, hook: AlignDevicesHook, args: tuple[Any, ...] = ()) -> _Values:
        """The weights of a hook, on its execution device; those that come next are on their way when this returns.

        Args:
            hook: the hook.
            args: the arguments of the forward that needs them.
        """
        if self._worker is not None and not self._worker.is_here():
            self._begin_anew()
        rank = self._rank(hook)
        if is_product(self._modules[rank]):
            self._rows_are_single = single_row(args)
        future = self._ready.pop(rank, None)
        if future is None:
            self._ready.clear()  # the order was another one: let go of what was fetched for it
            fetched = self._fetch(rank)
        else:
            fetched = future.result()
        self._learn(rank)
        self._fetch_next(rank)
        values = self._arrived(fetched, hook)
        return values if self._may_lie_anywhere(rank) else {name: aligned(value) for name, value in values.items()}

    def _begin_anew(self) -> None:
        """Let go of what the thread was doing: it stayed with the process that this one was forked from."""
        # The pool first: the thread may have held its lock, which what comes back to it would wait for.
        self.pool = BufferPool(self.pool.largest_reserve)
        self._ready.clear()
        self._worker = None

    def _may_lie_anywhere(self, rank: int) -> bool:
        """Whether a forward gives the same results wherever its weights are mapped."""
        module = self._modules[rank]
        if self._rows_are_single and is_product(module):
            return self._halves[rank]
        return self._indifferent[rank]

    def forget(self, hook: AlignDevicesHook) -> None:
        """Let go of what was fetched: the hook goes away."""
        self._ready.clear()
        hook.read_ahead = None

    def _rank(self, hook: AlignDevicesHook) -> int:
        if not self._ranks:  # a copy
            self._ranks = {id(hook): rank for rank, hook in enumerate(self._hooks)}
        return self._ranks[id(hook)]

    def _learn(self, rank: int) -> None:
        # The first hook of a forward follows the last one of the forward before; fetching it early would keep memory in
        # between.
        if self._last >= 0 and rank > 0:
            self._next[self._last] = rank
        self._last = rank

    def _fetch_next(self, rank: int) -> None:
        bytes_ahead, ahead = 0, self._next[rank]
        seen = {rank}
        while ahead >= 0 and ahead not in seen:
            seen.add(ahead)
            bytes_ahead += self._sizes[ahead]
            if bytes_ahead > self.window and len(seen) > 2:
                return
            if ahead not in self._ready:
                self._ready[ahead] = self._submit(ahead)
            ahead = self._next[ahead]

    def _submit(self, rank: int) -> Future[_Fetched]:
        if self._worker is None:
            self._worker = _Worker()
            weakref.finalize(self, self._worker.stop)
        return self._worker.submit(functools.partial(_fetch_for, weakref.ref(self), rank))

    # -- in the thread -----------------------------------------------------------------------------------------------

    def _fetch(self, rank: int) -> _Fetched:
        (source, full_names), device = self._sources[rank], self._hooks[rank].device
        values = {
            name: self._read(source, full, rank) for name, full in zip(self._names[rank], full_names, strict=True)
        }
        if device is None or device.type == "cpu":
            return values, None
        return self._send(values, device)

    def _read(self, source: Any, name: str, rank: int) -> torch.Tensor:
        if not isinstance(source, OffloadedWeightsLoader):
            value: torch.Tensor = source[name]
            return value
        if self._sparse[rank]:
            return source.read(name)
        source.ask_for(name)
        device = self._hooks[rank].device
        may_lie_anywhere = self._may_lie_anywhere(rank) or (device is not None and device.type != "cpu")
        value = source.read(name, None if may_lie_anywhere else self.pool)
        if name not in source.state_dict:
            _touch(value)
        return value

    def _send(self, values: _Values, device: torch.device) -> _Fetched:
        """Start the copies to an accelerator on a stream of their own, where it has streams."""
        kind = devices.get(device.type) if device.type in devices.names() else None
        if kind is None or not hasattr(kind.module, "Stream"):
            return {name: value.to(device) for name, value in values.items()}, None
        if device not in self._streams:
            self._streams[device] = kind.module.Stream(device=device)
        with kind.module.stream(self._streams[device]):
            sent = {name: _pinned(value).to(device, non_blocking=True) for name, value in values.items()}
            arrival = kind.module.Event()
            arrival.record(self._streams[device])
        return sent, arrival

    def _arrived(self, fetched: _Fetched, hook: AlignDevicesHook) -> _Values:
        """Let the computation wait for the copies, and the allocator know that it uses them."""
        values, arrival = fetched
        device = hook.device
        if arrival is None or device is None:
            return values
        present = devices.get(device.type).module.current_stream(device)
        present.wait_event(arrival)
        for value in values.values():
            value.record_stream(present)
        return values


def _fetch_for(owner: weakref.ref[ReadAhead], rank: int) -> _Fetched:
    read_ahead = owner()
    return ({}, None) if read_ahead is None else read_ahead._fetch(rank)


def _touch(value: torch.Tensor) -> None:
    """Have the system read what is mapped, by reading a byte of each page."""
    if value.is_contiguous() and value.numel():
        value.detach().reshape(-1).view(torch.uint8)[::_PAGE].sum()


def _pinned(value: torch.Tensor) -> torch.Tensor:
    """The values in memory that devices copy from on their own."""
    if value.device.type != "cpu" or value.is_pinned():
        return value
    return value.contiguous().pin_memory()


class _Worker:
    """A thread that works through a queue until it is told to stop. It holds no reference to who uses it."""

    _numbers = itertools.count()

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[Future[_Fetched], Callable[[], _Fetched]] | None] = queue.SimpleQueue()
        self._process = os.getpid()
        name = f"accel-read-ahead-{next(self._numbers)}"
        # A daemon: a program that ends does not wait for weights that nobody will use.
        threading.Thread(target=_work, args=(self._queue,), name=name, daemon=True).start()

    def is_here(self) -> bool:
        """Whether the thread is there; a forked process has the object and not the thread."""
        return self._process == os.getpid()

    def submit(self, task: Callable[[], _Fetched]) -> Future[_Fetched]:
        """Put a task in the queue."""
        future: Future[_Fetched] = Future()
        self._queue.put((future, task))
        return future

    def stop(self) -> None:
        """Let the thread end when its queue is empty."""
        self._queue.put(None)


def _work(tasks: queue.SimpleQueue[tuple[Future[_Fetched], Callable[[], _Fetched]] | None]) -> None:
    while (item := tasks.get()) is not None:
        future, task = item
        try:
            future.set_result(task())
        except BaseException as error:
            future.set_exception(error)
        # Else the last weights stay in memory until the next task comes.
        del item, future, task


def add_read_ahead(model: nn.Module) -> ReadAhead | None:
    """Give all hooks of a model that offload weights one reader that works ahead of them."""
    found: list[tuple[AlignDevicesHook, nn.Module]] = []
    for module in model.modules():
        found += [(hook, module) for hook in align_hooks(module) if hook.offload and hook.slots]
    if not found:
        return None
    return ReadAhead([hook for hook, _ in found], [module for _, module in found])

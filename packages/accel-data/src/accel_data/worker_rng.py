"""Random number generators of worker processes, restored exactly when an epoch is resumed.

A worker is seeded when it starts, and draws from the same generators for as long as it lives. With every batch it
sends the state of each generator that moved since its previous batch; the training process keeps the states as of the
batches it handed out, and gives them to the workers that it starts for a resumed epoch. The k-th batch of an epoch
comes from worker k modulo the number of workers, but torch always requests the first batch from worker 0. An epoch
that begins in the middle therefore shifts the workers: each takes the slot of another one.
"""

from __future__ import annotations

import random
import signal
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, get_worker_info

from . import loop_hooks
from ._torch_compat import pin_memory, set_worker_identity, shut_down_at_exit, stop_workers
from .rng_state import RngStates, capture_rng, from_plain, restore_rng, to_plain


@dataclass(slots=True)
class WorkerBatch:
    """A batch sent by a worker."""

    batch: Any  # result of the collate function
    worker: int  # slot of the worker, as numbered in the uninterrupted epoch
    base_seed: int  # the number to which slots are added to seed the workers of this loader
    states: RngStates  # generators that moved since the worker's previous batch

    def pin_memory(self, device: str | None = None) -> WorkerBatch:
        """Copy the batch to pinned memory."""
        return WorkerBatch(pin_memory(self.batch, device), self.worker, self.base_seed, self.states)


@dataclass
class WorkerHooks:
    """``worker_init_fn`` and ``collate_fn`` that run in the workers."""

    collate_fn: Callable[[Any], Any]  # that of the loader
    worker_init_fn: Callable[[int], Any] | None  # that of the loader
    shift: int  # number of slots by which workers are shifted
    base_seed: int | None  # the number to which slots are added to seed workers; None for the one that torch drew
    states: dict[int, RngStates]  # generator states to begin with by slot; other workers begin as torch seeds them
    signals: tuple[int, ...]  # signals handled by the training process, which would terminate a worker
    _previous: RngStates = field(default_factory=dict, init=False)
    _slot: int = field(default=0, init=False)

    def start(self, worker_id: int) -> None:
        """Initialise the worker, after torch has seeded its process."""
        for number in self.signals:
            signal.signal(number, signal.SIG_IGN)
        info: Any = get_worker_info()
        drawn = info.seed - worker_id
        self._slot = (worker_id + self.shift) % info.num_workers
        base_seed = drawn if self.base_seed is None else self.base_seed
        if (self._slot, base_seed) != (worker_id, drawn):
            set_worker_identity(self._slot, base_seed + self._slot)
            seed_worker(base_seed, self._slot)
        if self.worker_init_fn is not None:
            self.worker_init_fn(self._slot)
        restore_rng(self.states.get(self._slot, {}))
        self.base_seed = base_seed
        self._previous = capture_rng()

    def collate(self, samples: Any) -> WorkerBatch:
        """Collate a batch, and attach the generators that moved since the previous one."""
        batch = self.collate_fn(samples)
        states = capture_rng()
        moved = {library: state for library, state in states.items() if state != self._previous[library]}
        self._previous = states
        assert self.base_seed is not None
        return WorkerBatch(batch, self._slot, self.base_seed, moved)


def seed_worker(base_seed: int, slot: int) -> None:
    """Seed the global generators the way torch seeds the worker with that number.

    torch seeds numpy from its own copy of ``numpy.random.SeedSequence`` over worker number and base seed.
    """
    seed = base_seed + slot
    random.seed(seed)
    torch.manual_seed(seed)
    np.random.seed(np.random.SeedSequence([slot, base_seed & 0xFFFFFFFF, base_seed >> 32, 0]).generate_state(4))


class WorkerRngStates:
    """The workers' generator states as of the batches handed out in one iteration."""

    def __init__(
        self,
        before: int = 0,
        base_seed: int | None = None,
        kept: bool = False,
        states: dict[int, RngStates] | None = None,
    ) -> None:
        self.before = before  # batches of the epoch handed out before this iteration
        self.base_seed = base_seed  # that of workers to continue; None for new workers
        self.kept = kept  # whether the workers run since an earlier epoch, so that this one drew no seed for them
        self._states = states or {}  # at the start, by slot
        self._at_start = {worker: dict(state) for worker, state in self._states.items()}
        self._recent: deque[tuple[int, int, RngStates]] = deque()
        self.shifted: bool = False

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> WorkerRngStates:
        """Return the inverse of :meth:`to_plain`."""
        states = {int(worker): from_plain(state) for worker, state in plain["states"].items()}
        return cls(int(plain["batches"]), int(plain["base_seed"]), bool(plain["kept"]), states)

    def to_plain(self, handed_out: int) -> dict[str, Any]:
        """Return the states after ``handed_out`` batches as plain data; empty before the first batch of new workers."""
        return self._to_plain(self.before + handed_out, self._after(handed_out))

    def to_plain_at_start(self) -> dict[str, Any]:
        """Like :meth:`to_plain`, for an epoch that is read again from its start; empty if it began with new workers."""
        return self._to_plain(0, self._at_start) if self.kept else {}

    def _to_plain(self, batches: int, states: dict[int, RngStates]) -> dict[str, Any]:
        if self.base_seed is None:
            return {}
        plain = {worker: to_plain(state) for worker, state in states.items()}
        return {"batches": batches, "base_seed": self.base_seed, "kept": self.kept, "states": plain}

    def for_next_epoch(self) -> WorkerRngStates:
        """Return the states with which persistent workers begin the next epoch."""
        following = WorkerRngStates(0, self.base_seed, True, self._after(None))
        # A slot follows from the position in the epoch, so workers that were shifted for the rest of one cannot
        # continue with the next.
        following.shifted = self.shifted
        return following

    def _after(self, handed_out: int | None) -> dict[int, RngStates]:
        states = {worker: dict(state) for worker, state in self._states.items()}
        for index, worker, moved in self._recent:
            if handed_out is None or index < handed_out:
                states.setdefault(worker, {}).update(moved)
        return states

    def open(self, base: DataLoader[Any], handed_out: Callable[[], int], *, track: bool) -> Iterator[Any]:
        """Begin an iteration of a torch loader that has workers; ``track`` keeps their generator states."""
        shift = self.before % base.num_workers
        if self.shifted:
            stop_workers(base)
        self.shifted = shift > 0
        hooks = WorkerHooks(
            base.collate_fn, base.worker_init_fn, shift, self.base_seed, self._states, loop_hooks.signals()
        )
        settings: dict[str, Any] = {"worker_init_fn": hooks.start}
        if track:
            settings["collate_fn"] = hooks.collate
        if self.kept:
            # Persistent workers draw no seed, so workers that replace them must not draw one either.
            settings["generator"] = torch.Generator()
        with _temporary_settings(base, settings):
            batches = iter(base)
        if hooks.signals:
            shut_down_at_exit(batches)
        return self._unwrapped(batches, handed_out) if track else batches

    def _unwrapped(self, batches: Iterator[WorkerBatch], handed_out: Callable[[], int]) -> Iterator[Any]:
        for index, sent in enumerate(batches):
            self.base_seed = sent.base_seed
            if sent.states:
                self._merge_up_to(handed_out())
                self._recent.append((index, sent.worker, sent.states))
            yield sent.batch

    def _merge_up_to(self, handed_out: int) -> None:
        while self._recent and self._recent[0][0] < handed_out:
            _, worker, moved = self._recent.popleft()
            self._states.setdefault(worker, {}).update(moved)


@contextmanager
def _temporary_settings(base: DataLoader[Any], settings: dict[str, Any]) -> Iterator[None]:
    previous = {name: getattr(base, name) for name in settings}
    for name, value in settings.items():
        setattr(base, name, value)
    try:
        yield
    finally:
        for name, value in previous.items():
            setattr(base, name, value)

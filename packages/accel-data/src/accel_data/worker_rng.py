"""The random numbers of worker processes, so that a resumed epoch draws those that the uninterrupted one would have
drawn.

A worker is seeded when it starts, and then draws on for as long as it lives. So with every batch it sends along the
state of each generator that moved since its last one; the process that trains keeps the states as of the batches it
handed out. Workers started for a resumed epoch are given them. The k-th batch of an epoch is the work of worker k
modulo their number, but torch always deals the first batch it asks for to worker 0: where an epoch is entered in the
middle, the workers therefore change places.
"""

from __future__ import annotations

import random
import signal
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, get_worker_info
from torch.utils.data._utils.pin_memory import pin_memory

from . import loop_hooks

# States of generators by library, as they travel between processes: bytes of torch's, tuples of the others.
_States = dict[str, Any]


class WorkerBatch:
    """A batch on its way from a worker.

    Attributes:
        batch: what the collate function made.
        worker: the worker's place, as the uninterrupted epoch counts them.
        base_seed: what the seeds of this loader's workers are counted from.
        states: generators that moved since the worker's last batch.
    """

    __slots__ = ("base_seed", "batch", "states", "worker")

    def __init__(self, batch: Any, worker: int, base_seed: int, states: _States) -> None:
        self.batch = batch
        self.worker = worker
        self.base_seed = base_seed
        self.states = states

    def pin_memory(self, device: str | None = None) -> WorkerBatch:
        """The same, with the batch in pinned memory."""
        return WorkerBatch(pin_memory(self.batch, device), self.worker, self.base_seed, self.states)


def capture() -> _States:
    """The generators of this process, quick to compare and to send."""
    state: Any = np.random.get_state()
    name, keys, *rest = state
    return {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "numpy": (name, keys.tobytes(), *rest),
        "python": random.getstate(),
    }


def restore(states: _States) -> None:
    """Put generators back to what :func:`capture` returned; those that are not mentioned stay."""
    if "torch" in states:
        torch.set_rng_state(torch.frombuffer(bytearray(states["torch"]), dtype=torch.uint8))
    if "numpy" in states:
        name, keys, *rest = states["numpy"]
        np.random.set_state((name, np.frombuffer(keys, dtype=np.uint32), *rest))
    if "python" in states:
        version, words, gauss = states["python"]
        random.setstate((version, tuple(words), gauss))


class WorkerSide:
    """What runs in the workers: their start, and the collate function.

    Args:
        collate_fn: the loader's own.
        worker_init_fn: the loader's own.
        shift: places by which workers are moved.
        base_seed: what their seeds are counted from; None for what torch drew.
        states: generators to begin with, by place; workers without begin as torch seeds them.
        signals: signals that are for the process that trains, and would end a worker.
    """

    def __init__(
        self,
        collate_fn: Callable[[Any], Any],
        worker_init_fn: Callable[[int], Any] | None,
        shift: int,
        base_seed: int | None,
        states: dict[int, _States],
        signals: tuple[int, ...],
    ) -> None:
        self.collate_fn = collate_fn
        self.worker_init_fn = worker_init_fn
        self.shift = shift
        self.base_seed = base_seed
        self.states = states
        self.signals = signals
        self._known: _States = {}
        self._place = 0

    def start(self, worker_id: int) -> None:
        """Begin as this worker; torch calls it once it has seeded the process."""
        for number in self.signals:
            signal.signal(number, signal.SIG_IGN)
        info: Any = get_worker_info()
        drawn = info.seed - worker_id
        self._place = (worker_id + self.shift) % info.num_workers
        base_seed = drawn if self.base_seed is None else self.base_seed
        if (self._place, base_seed) != (worker_id, drawn):
            # torch has no way to start a worker in another's place. The object itself refuses assignments, which would
            # be mistakes.
            object.__setattr__(info, "id", self._place)
            object.__setattr__(info, "seed", base_seed + self._place)
            seed_as_torch_does(base_seed, self._place)
        if self.worker_init_fn is not None:
            self.worker_init_fn(self._place)
        restore(self.states.get(self._place, {}))
        self.base_seed = base_seed
        self._known = capture()

    def collate(self, samples: Any) -> WorkerBatch:
        """A batch, with the generators that moved while it was made."""
        batch = self.collate_fn(samples)
        now = capture()
        moved = {library: state for library, state in now.items() if state != self._known[library]}
        self._known = now
        assert self.base_seed is not None
        return WorkerBatch(batch, self._place, self.base_seed, moved)


def seed_as_torch_does(base_seed: int, worker: int) -> None:
    """Seed the generators of this process like torch those of the worker in that place.

    numpy's seed is that of ``numpy.random.SeedSequence`` over worker and base seed, of which torch has a copy that
    needs no numpy.
    """
    seed = base_seed + worker
    random.seed(seed)
    torch.manual_seed(seed)
    np.random.seed(np.random.SeedSequence([worker, base_seed & 0xFFFFFFFF, base_seed >> 32, 0]).generate_state(4))


class WorkerStates:
    """The workers' generators as of the batches handed out, in one iteration.

    Args:
        before: batches of the epoch that were handed out before this iteration began.
        base_seed: of the workers, where they are to go on as others; None for new ones.
        kept: whether the workers have been at work since an earlier epoch, so that this one drew no seed for them.
        states: their generators at the start.
    """

    def __init__(
        self,
        before: int = 0,
        base_seed: int | None = None,
        kept: bool = False,
        states: dict[int, _States] | None = None,
    ) -> None:
        self.before = before
        self.base_seed = base_seed
        self.kept = kept
        self._states = states or {}
        self._at_start = {worker: dict(state) for worker, state in self._states.items()}
        self._recent: deque[tuple[int, int, _States]] = deque()
        self.moved_places = False

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> WorkerStates:
        """The inverse of :meth:`to_plain`."""
        states = {int(worker): _from_plain(state) for worker, state in plain["states"].items()}
        return cls(int(plain["batches"]), int(plain["base_seed"]), bool(plain["kept"]), states)

    def to_plain(self, handed_out: int) -> dict[str, Any]:
        """Tensors, numbers and tuples only; empty before the first batch of new workers.

        Args:
            handed_out: batches of this iteration that were handed out.
        """
        if self.base_seed is None:
            return {}
        states = {worker: _to_plain(state) for worker, state in self._after(handed_out).items()}
        return {"batches": self.before + handed_out, "base_seed": self.base_seed, "kept": self.kept, "states": states}

    def to_plain_at_start(self) -> dict[str, Any]:
        """Like :meth:`to_plain`, for an epoch that is read again from its start; empty where new workers began it."""
        if self.base_seed is None or not self.kept:
            return {}
        states = {worker: _to_plain(state) for worker, state in self._at_start.items()}
        return {"batches": 0, "base_seed": self.base_seed, "kept": True, "states": states}

    def for_next_epoch(self) -> WorkerStates:
        """Where workers that live on begin the next epoch."""
        following = WorkerStates(0, self.base_seed, True, self._after(None))
        # A place is dealt by the position in the epoch, so workers that moved for the rest of one cannot go on with the
        # next.
        following.moved_places = self.moved_places
        return following

    def _after(self, handed_out: int | None) -> dict[int, _States]:
        states = {worker: dict(state) for worker, state in self._states.items()}
        for index, worker, moved in self._recent:
            if handed_out is None or index < handed_out:
                states.setdefault(worker, {}).update(moved)
        return states

    def open(self, base: DataLoader[Any], handed_out: Callable[[], int], *, track: bool) -> Iterator[Any]:
        """Begin the loader's iteration.

        Args:
            base: the torch loader, with workers.
            handed_out: tells how many batches of this iteration were handed out.
            track: keep the workers' generators.
        """
        shift = self.before % base.num_workers
        if self.moved_places:
            base._iterator = None
        self.moved_places = shift > 0
        side = WorkerSide(
            base.collate_fn, base.worker_init_fn, shift, self.base_seed, self._states, loop_hooks.signals()
        )
        settings: dict[str, Any] = {"worker_init_fn": side.start}
        if track:
            settings["collate_fn"] = side.collate
        if self.kept:
            # Workers that live on draw no seed; those that take their place must not either.
            settings["generator"] = torch.Generator()
        with _with_settings(base, settings):
            batches = iter(base)
        return self._unwrapped(batches, handed_out) if track else batches

    def _unwrapped(self, batches: Iterator[WorkerBatch], handed_out: Callable[[], int]) -> Iterator[Any]:
        for index, sent in enumerate(batches):
            self.base_seed = sent.base_seed
            if sent.states:
                self._forget_up_to(handed_out())
                self._recent.append((index, sent.worker, sent.states))
            yield sent.batch

    def _forget_up_to(self, handed_out: int) -> None:
        while self._recent and self._recent[0][0] < handed_out:
            _, worker, moved = self._recent.popleft()
            self._states.setdefault(worker, {}).update(moved)


@contextmanager
def _with_settings(base: DataLoader[Any], settings: dict[str, Any]) -> Iterator[None]:
    former = {name: getattr(base, name) for name in settings}
    for name, value in settings.items():
        setattr(base, name, value)
    try:
        yield
    finally:
        for name, value in former.items():
            setattr(base, name, value)


def _to_plain(states: _States) -> dict[str, Any]:
    plain = dict(states)
    if "torch" in plain:
        plain["torch"] = torch.frombuffer(bytearray(plain["torch"]), dtype=torch.uint8)
    if "numpy" in plain:
        name, keys, *rest = plain["numpy"]
        plain["numpy"] = (name, np.frombuffer(keys, dtype=np.uint32).tolist(), *rest)
    return plain


def _from_plain(plain: dict[str, Any]) -> _States:
    states = dict(plain)
    if "torch" in states:
        states["torch"] = states["torch"].numpy().tobytes()
    if "numpy" in states:
        name, keys, *rest = states["numpy"]
        states["numpy"] = (name, np.asarray(keys, dtype=np.uint32).tobytes(), *rest)
    return states

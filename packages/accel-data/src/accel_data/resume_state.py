"""The progress of a loader: its epochs, the iteration in progress, and where a resumed iteration begins."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from accel_state.errors import ConfigurationError
from accel_state.operations.nested import leaves

from .batch_shard import EpochProgress
from .lookahead import ReadAheadTracker
from .worker_rng import WorkerRngStates

STATE_FORMAT = 1


def steps_of_torchdata(state: dict[str, Any]) -> int | None:
    """Batches handed out in the current epoch of a torchdata StatefulDataLoader state; None for any other state."""
    if "_num_yielded" in state:
        steps = int(state["_num_yielded"])
    elif "_snapshot" in state and "_steps_since_snapshot" in state:
        steps = int(state["_snapshot"]["_snapshot_step"]) + int(state["_steps_since_snapshot"])
    else:
        return None
    return 0 if state.get("_iterator_finished") else steps


def with_steps(state: dict[str, Any], steps: int) -> dict[str, Any]:
    """Return a torchdata StatefulDataLoader state of map-style data with another number of batches handed out."""
    if "_snapshot" not in state:
        return {**state, "_num_yielded": steps, "_sampler_iter_yielded": steps}
    snapshot = {**state["_snapshot"], "_snapshot_step": steps - state["_steps_since_snapshot"]}
    return {**state, "_snapshot": snapshot}


def sampler_generator(state: dict[str, Any]) -> torch.Tensor | None:
    """Return the generator of the epoch's order by torchdata's random sampler, in a StatefulDataLoader state."""
    main = state.get("_snapshot", {}).get("_main_snapshot", state)
    sampler = main.get("_sampler_iter_state") or {}
    sampler = sampler.get("sampler_iter_state") or sampler
    generator = sampler.get("generator")
    return generator if isinstance(generator, torch.Tensor) else None


def knows_position(source: dict[str, Any]) -> bool:
    """Return True if a torchdata StatefulDataLoader state holds a position saved by the data set or its iterator.

    Otherwise torchdata skips by a count that is wrong in the second restart of an epoch. The state of a worker that
    finished before the others holds the start of the next epoch, which torchdata would begin at once.
    """
    workers = source.get("_snapshot", {}).get("_worker_snapshots", {}).values()
    known = False
    for part in workers or [source]:
        fetcher = part.get("fetcher_state") or {}
        if fetcher.get("dataset_iter_state") is not None:
            known = True
        elif part.get("dataset_state") is not None:
            if workers and fetcher.get("fetcher_ended"):
                return False
            known = True
    return known


@dataclass
class ResumePoint:
    """The content of a loader's state dictionary: where an iteration begins, and with which randomness."""

    epoch: int  # epoch of the iteration
    unit: str  # what positions count: samples, batches or items of the whole stream; steps if only those are known
    position: int = 0  # units handed out since the start of the epoch, on all ranks together
    num_processes: int = 1  # ranks when the state was saved
    num_workers: int = 0  # worker processes when the state was saved
    order: dict[str, Any] = field(default_factory=dict)  # randomness that the order was drawn from; empty draws anew
    begin: dict[str, Any] = field(default_factory=dict)  # generators at the start of the epoch; empty leaves them alone
    read_ahead: dict[str, Any] = field(default_factory=dict)  # generators before each batch read but not handed out
    source: dict[str, Any] = field(default_factory=dict)  # state of a StatefulDataLoader
    workers: dict[str, Any] = field(default_factory=dict)  # see WorkerRngStates
    finished: bool = False  # whether the last batch of the epoch was handed out

    def to_state(self) -> dict[str, Any]:
        """Return a dictionary of numbers, strings, tuples and tensors, with the keys of ``source`` and its own."""
        own = dict(vars(self))
        return {**own.pop("source"), "format": STATE_FORMAT, **own}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> ResumePoint:
        """Return the inverse of :meth:`to_state`.

        Raises:
            ConfigurationError: a value is missing, has another type, or is out of bounds.
        """
        names = set(cls.__dataclass_fields__) - {"source"}
        remaining = {"finished": False, **state}  # which states of earlier versions lack
        if remaining.pop("format", None) != STATE_FORMAT or not names <= set(remaining):
            raise ConfigurationError(
                f"this is not the state of a prepared loader in format {STATE_FORMAT}: it has "
                f"format={state.get('format')!r} and the keys {sorted(state)}. Expected the keys format, "
                f"{', '.join(sorted(names))}, as returned by state_dict() of a prepared loader."
            )
        own = dict(zip(names, map(remaining.pop, names), strict=True))
        # Earlier versions saved the state of a StatefulDataLoader under a key of its own.
        own["source"] = remaining.pop("source", None) or remaining
        for name, least in (("epoch", 0), ("position", 0), ("num_processes", 1), ("num_workers", 0)):
            value = own[name]
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**63:
                raise ConfigurationError(
                    f"the state of the loader has {name}={value!r}, not a whole number from {least} to 2**63 - 1."
                )
        for name in ("order", "begin", "read_ahead", "workers", "source"):
            if not isinstance(own[name], dict):
                raise ConfigurationError(f"the state of the loader has {name}={own[name]!r}, not a dictionary.")
        for name in ("order", "begin"):
            generator = own[name].get("generator")
            try:
                if generator is not None:
                    torch.Generator().set_state(generator)
            except (TypeError, RuntimeError) as error:
                raise ConfigurationError(
                    f"the state of the loader has a damaged random number generator in {name}: {error}"
                ) from error
        return cls(**own)


@dataclass
class Iteration:
    """One pass over the data."""

    epoch: int
    resume: ResumePoint | None = None  # where it begins, unless at the start of a new order
    position: int = 0  # units of the stream that were handed out before its first step
    steps: int = 0  # batches handed out
    progress: EpochProgress | None = None  # that of the sharded sampler; None for iterable data
    begin: dict[str, Any] = field(default_factory=dict)  # generator states when it began
    tracker: ReadAheadTracker | None = None  # states before the batches that were read ahead, if tracked
    workers: WorkerRngStates | None = None  # the worker processes' generator states
    first_batch: Any = None  # the first batch, which missing samples are taken from
    dropped: Any = None  # the last batch that was read and skipped
    finished: bool = False  # whether its last batch was handed out
    open: bool = True  # False once it ended or was abandoned
    keeps_rng: bool = False  # whether the generators are those of the loaded state, and not of the epoch's start
    latest: list[weakref.ref[torch.Tensor]] = field(default_factory=list)  # tensors of the batch, if remembered

    def remember(self, batch: Any) -> Any:
        """Remember the tensors of the batch that is handed out, as long as they exist."""
        self.latest = [weakref.ref(tensor) for tensor in leaves(batch)]
        return batch

    def tensors(self) -> list[torch.Tensor]:
        """Return the remembered tensors of the latest batch."""
        return [tensor for tensor in (ref() for ref in self.latest) if tensor is not None]

    @property
    def can_rewind(self) -> bool:
        """True if it begins in the middle of an epoch; between epochs, there is no order yet that could be repeated."""
        return self.resume is not None and self.resume.position > 0 and not self.resume.finished

    def rewind(self, keeps_order: bool) -> None:
        """Begin a loaded epoch with its first batch; ``keeps_order``: its order follows from the epoch's start."""
        if self.resume is not None:
            begin = self.resume.begin if keeps_order else {}
            self.resume = replace(self.resume, position=0, begin=begin, read_ahead={}, source={}, workers={})
            self.keeps_rng = keeps_order

    def position_after(self, progress: EpochProgress, steps: int) -> int:
        """Position in the stream of a sharded sampler after that many of its steps."""
        position = progress.start + steps * progress.step_size
        return position if progress.length is None else min(position, max(progress.start, progress.length))

    def close(self) -> None:
        """Mark the iteration as ended or abandoned."""
        self.open = False
        # Both refer to this object; the cycle would keep a loader's workers alive until the next garbage collection.
        self.tracker = self.workers = None


@dataclass(eq=False)
class EpochClock:
    """The epochs of a loader, shared with loaders made from it by :func:`accel_data.skip_first_batches`.

    Each iteration is an epoch, even if it is abandoned, so that all ranks agree on the number.
    """

    upcoming: int = 0  # epoch of the next iteration
    current: Iteration | None = None  # the latest iteration
    pending: ResumePoint | None = None  # where the next iteration begins, if a state was loaded
    keeps_finished: bool = True  # whether a loaded epoch without remaining batches is iterated too
    from_start: bool = False  # whether a loaded epoch begins with its first batch

    @property
    def must_finish(self) -> bool:
        """True if a loaded epoch without remaining batches is completed before the next iteration begins."""
        return self.pending is not None and self.pending.finished and not self.keeps_finished

    @property
    def epoch(self) -> int:
        """Epoch of the iteration in progress, or of the next one."""
        if self.current is not None and self.current.open:
            return self.current.epoch
        if self.must_finish and self.pending is not None:
            return self.pending.epoch + 1
        return self.upcoming

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration; a loaded state of another epoch is discarded."""
        self.upcoming, pending = epoch, self.pending
        if pending is not None and pending.finished and epoch - pending.epoch in (0, 1):
            # The order of the next epoch depends on the generators at the end of the finished one, so its state stays.
            self.keeps_finished = epoch == pending.epoch
        elif pending is not None and pending.epoch != epoch:
            self.pending = None

    def pass_over(self, pass_over: bool) -> None:
        """Choose whether a loaded epoch without remaining batches is followed by the next one at once."""
        self.keeps_finished, self.from_start = not pass_over, self.from_start and pass_over
        if self.pending is not None:
            self.upcoming = self.pending.epoch

    def load(self, point: ResumePoint, pass_over: bool = False) -> None:
        """Begin the next iteration at ``point``."""
        self.from_start = False
        self.upcoming = point.epoch
        self.pending = point
        self.keeps_finished = not pass_over
        self.current = None

    def begin(self) -> Iteration:
        """Begin the next iteration."""
        self.current = Iteration(self.upcoming, self.pending)
        self.pending = None
        self.upcoming += 1
        return self.current

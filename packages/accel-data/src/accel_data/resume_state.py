"""How far a loader is: its epochs, the iteration in progress, and where a resumed one begins."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from accel_state.errors import ConfigurationError

from .batch_shard import EpochProgress
from .lookahead import ReadAheadWatch
from .worker_rng import WorkerStates

STATE_FORMAT = 1


def steps_of_torchdata(state: dict[str, Any]) -> int | None:
    """Batches handed out in the epoch that a state of torchdata's StatefulDataLoader is in; None for a state of another
    kind.

    Other libraries save such states for their loaders too.
    """
    if "_num_yielded" in state:
        steps = int(state["_num_yielded"])
    elif "_snapshot" in state and "_steps_since_snapshot" in state:
        steps = int(state["_snapshot"]["_snapshot_step"]) + int(state["_steps_since_snapshot"])
    else:
        return None
    return 0 if state.get("_iterator_finished") else steps


def knows_position(source: dict[str, Any]) -> bool:
    """Whether in a state of torchdata's StatefulDataLoader the data set, or its iterator, says where it is.

    Otherwise torchdata reads on from the start by a count that is wrong in the second restart of an epoch. Of a worker
    that is through while others are not, the data set says where the next epoch begins; torchdata would begin it at
    once.
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
    """Where an iteration begins, and what its order and random numbers can be had again from: what a state dictionary
    holds.

    Attributes:
        epoch: epoch that the iteration belongs to.
        unit: what positions count: samples, batches or items of the whole stream, or steps of a loader of which only
            steps are known.
        position: units handed out since the start of the epoch, on all ranks together.
        num_processes: number of ranks that the state is from.
        num_workers: worker processes of the loader that the state is from.
        order: randomness that the epoch's order was drawn from; empty if it is drawn anew.
        begin: generators as they stood when the epoch began; empty if they are left alone.
        read_ahead: generators as they stood before each batch that was read but not handed out.
        source: state of a loader that keeps its own (torchdata).
        workers: generators of the worker processes, as of the batches handed out; see
            :class:`accel_data.worker_rng.WorkerStates`.
    """

    epoch: int
    unit: str
    position: int = 0
    num_processes: int = 1
    num_workers: int = 0
    order: dict[str, Any] = field(default_factory=dict)
    begin: dict[str, Any] = field(default_factory=dict)
    read_ahead: dict[str, Any] = field(default_factory=dict)
    source: dict[str, Any] = field(default_factory=dict)
    workers: dict[str, Any] = field(default_factory=dict)

    def to_state(self) -> dict[str, Any]:
        """A dictionary of numbers, strings, tuples and tensors."""
        return {"format": STATE_FORMAT, **vars(self)}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> ResumePoint:
        """The inverse of :meth:`to_state`.

        Raises:
            ConfigurationError: this is not such a dictionary, or one of another version.
        """
        names = list(cls.__dataclass_fields__)
        if state.get("format") != STATE_FORMAT or not set(names) <= set(state):
            raise ConfigurationError(
                f"this is not the state of a prepared loader in format {STATE_FORMAT}: it has "
                f"format={state.get('format')!r} and the keys "
                f"{sorted(state)}. "
                f"Expected the keys format, {', '.join(names)}, as state_dict() of a prepared loader returns them."
            )
        return cls(**{name: state[name] for name in names})

    def check_fits(self, unit: str) -> None:
        """Raise ConfigurationError if positions of this state mean nothing to a loader that counts in ``unit``."""
        if self.unit != unit:
            raise ConfigurationError(
                f"the state counts {self.unit}, and this loader counts {unit}: it was saved by a loader of another "
                "kind. Build the loader "
                "as it was when the state was saved (map-style or iterable data, batch sampler, batch_size=None, "
                "dispatch_batches)."
            )


@dataclass
class Iteration:
    """One pass over the data, from begin to end.

    Attributes:
        epoch: its number.
        resume: where it begins, if not at the start of a new order.
        position: units of the stream that were handed out before its first step.
        steps: batches handed out.
        progress: what the sharded sampler knows; None for an iterable data set.
        begin: generators as they stood when it began.
        watch: what stood before the batches that were read ahead; None if nothing is kept of that.
        workers: the worker processes' generators; None where there are none.
        first_batch: the first batch read, where missing samples are taken from it.
        dropped: the last batch that was read and left out.
        open: False once it ended or was abandoned.
    """

    epoch: int
    resume: ResumePoint | None = None
    position: int = 0
    steps: int = 0
    progress: EpochProgress | None = None
    begin: dict[str, Any] = field(default_factory=dict)
    watch: ReadAheadWatch | None = None
    workers: WorkerStates | None = None
    first_batch: Any = None
    dropped: Any = None
    open: bool = True

    def close(self) -> None:
        """It ended, or was abandoned."""
        self.open = False
        # Both ask this object how far it is; such a circle would keep a loader's workers alive until the next garbage
        # collection.
        self.watch = self.workers = None


class EpochClock:
    """The epochs of a loader; a loader with batches skipped shares it with the loader it was made from.

    An iteration is an epoch, also one that is abandoned, so that all ranks agree on the number whoever saw the end of
    the data.

    Attributes:
        upcoming: epoch of the next iteration.
        current: the latest iteration.
        pending: where the next iteration begins, if a state was loaded.
    """

    def __init__(self, upcoming: int = 0) -> None:
        self.upcoming = upcoming
        self.current: Iteration | None = None
        self.pending: ResumePoint | None = None

    @property
    def epoch(self) -> int:
        """Epoch of the iteration in progress, or of the next one."""
        return self.current.epoch if self.current is not None and self.current.open else self.upcoming

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration; one that a loaded state is in the middle of stays there."""
        self.upcoming = epoch
        if self.pending is not None and self.pending.epoch != epoch:
            self.pending = None

    def load(self, point: ResumePoint) -> None:
        """Begin the next iteration there."""
        self.upcoming = point.epoch
        self.pending = point
        self.current = None

    def begin(self) -> Iteration:
        """Begin the next iteration."""
        self.current = Iteration(self.upcoming, self.pending)
        self.pending = None
        self.upcoming += 1
        return self.current

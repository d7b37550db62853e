"""Which samples does rank r get in step s? Pure functions of a few integers, on which every sharded loader rests.

A global step takes ``num_processes * batch_size`` consecutive samples of the stream (the data set in the order of its
sampler), and rank r gets the r-th run of ``batch_size`` of them. So gathering a step in the order of ranks gives back
the stream, and a rank computes its share without looking at anybody else's: the cost does not depend on the number of
processes, nor on the data's length.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from accel_state.errors import ConfigurationError


@dataclass(frozen=True)
class ShardPlan:
    """How ``length`` samples are dealt to ``num_processes`` ranks, ``batch_size`` samples a rank and step.

    Positions count samples of the stream from its start. An epoch may begin at a later position (``start``), when it is
    resumed.

    Attributes:
        length: samples in the stream.
        batch_size: samples a rank gets in a step.
        num_processes: number of ranks.
        drop_last: leave out the last step if it would not be full on every rank.
        even_batches: complete the last step with samples from the start of the stream, so that every rank has a full
            batch. Otherwise the last batches are short, and some ranks may have one step fewer.
        start: position of the first sample that is still to come.
    """

    length: int
    batch_size: int
    num_processes: int = 1
    drop_last: bool = False
    even_batches: bool = True
    start: int = 0

    @property
    def step_size(self) -> int:
        """Samples of the stream that one global step takes."""
        return self.batch_size * self.num_processes

    @property
    def remaining(self) -> int:
        """Samples of the stream that are still to come at the start."""
        return max(0, self.length - self.start)

    @property
    def full_steps(self) -> int:
        """Steps in which every rank has a whole batch of its own samples."""
        return self.remaining // self.step_size

    @property
    def tail(self) -> int:
        """Samples left after the full steps, in [0, step_size); 0 also if they are dropped."""
        return 0 if self.drop_last else self.remaining % self.step_size

    @property
    def remainder(self) -> int:
        """Samples in the last global step that are no padding; -1 where there is nothing to leave out after a gather."""
        return self.tail or -1

    def steps(self, rank: int) -> int:
        """Number of batches that ``rank`` gets."""
        return self.full_steps + (1 if self._has_tail(rank) else 0)

    @property
    def samples(self) -> int:
        """Samples of the stream, from the start on, that are handed out."""
        return self.full_steps * self.step_size + self.tail

    def _has_tail(self, rank: int) -> bool:
        return self.tail > 0 if self.even_batches else self.tail > rank * self.batch_size

    def real_samples(self, rank: int, step: int) -> int:
        """Samples of the rank's batch in that step that are no padding, in [0, batch_size]."""
        if step < self.full_steps:
            return self.batch_size
        return min(self.batch_size, max(0, self.tail - rank * self.batch_size))

    def ranges(self, rank: int, step: int) -> list[range]:
        """Positions that make up the rank's batch in that step, as runs of consecutive positions.

        One run, except in the last step of uneven data, where the padding wraps around to the start of the stream (as
        often as it takes, when the whole data set is smaller than a step).
        """
        first = self.start + step * self.step_size + rank * self.batch_size
        last = first + self.batch_size
        if last <= self.length:
            return [range(first, last)]
        if not self.even_batches:
            return [range(first, self.length)]
        return list(wrapped_ranges(first, last, self.length))

    def position_after(self, steps: int) -> int:
        """Position reached after that many global steps from the start, at most ``length``."""
        return min(self.start + steps * self.step_size, max(self.start, self.length))


def wrapped_ranges(first: int, last: int, length: int) -> Iterator[range]:
    """Cut positions [first, last) at multiples of ``length`` and fold each piece back into [0, length)."""
    while first < last:
        offset = first % length
        stop = min(length, offset + last - first)
        yield range(offset, stop)
        first += stop - offset


def balanced_range(total: int, num_processes: int, rank: int) -> range:
    """The rank-th of ``num_processes`` consecutive pieces of [0, total), whose sizes differ by at most one."""
    size, larger = divmod(total, num_processes)
    first = rank * size + min(rank, larger)
    return range(first, first + size + (1 if rank < larger else 0))


def per_process_batch_size(batch_size: int, num_processes: int) -> int:
    """Size of a rank's slice of a batch that all ranks share (split_batches).

    Raises:
        ConfigurationError: the batch cannot be divided evenly.
    """
    if batch_size % num_processes == 0:
        return batch_size // num_processes
    below = batch_size // num_processes * num_processes
    nearest = f"{below} or {below + num_processes}" if below else f"{num_processes}"
    raise ConfigurationError(
        f"split_batches=True divides each batch among the processes, and a batch size of {batch_size} cannot be "
        "divided among "
        f"{num_processes} processes. Use a batch size of {nearest}, or split_batches=False with the batch size of one "
        "process."
    )


def check_rank(num_processes: int, process_index: int) -> None:
    """Raise ConfigurationError unless ``process_index`` is a rank of a world of ``num_processes``."""
    if num_processes < 1:
        raise ConfigurationError(f"num_processes={num_processes} is not a number of processes; it must be at least 1")
    if not 0 <= process_index < num_processes:
        raise ConfigurationError(
            f"process_index={process_index} is not a rank of {num_processes} processes; it must be in [0, "
            f"{num_processes - 1}]"
        )

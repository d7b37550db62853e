"""Which samples does rank r get in step s? Pure integer functions that every sharded loader is built on.

A global step takes ``num_processes * batch_size`` consecutive samples of the stream (the data set in the order of its
sampler), and rank r gets the r-th run of ``batch_size`` of them. Gathering a step in the order of ranks therefore
restores the stream, and the cost of computing a rank's share depends neither on the number of processes nor on the
length of the data.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from accel_state.errors import ConfigurationError
from accel_state.splitting import share_bounds


@dataclass(frozen=True)
class ShardPlan:
    """How ``length`` samples are distributed over ``num_processes`` ranks in steps.

    Positions count samples from the start of the stream.

    Attributes:
        length: samples in the stream.
        batch_size: samples per rank and step.
        num_processes: number of ranks.
        drop_last: drop the last step if it is not full on every rank.
        even_batches: complete the last step with samples from the start of the stream, so that every rank has a full
            batch. Otherwise the last batches are short, and some ranks may have one step fewer.
        start: position at which the epoch begins; greater than 0 when it is resumed.
    """

    length: int
    batch_size: int
    num_processes: int = 1
    drop_last: bool = False
    even_batches: bool = True
    start: int = 0

    @property
    def step_size(self) -> int:
        """Samples of the stream per global step."""
        return self.batch_size * self.num_processes

    @property
    def remaining(self) -> int:
        """Samples of the stream from ``start`` on."""
        return max(0, self.length - self.start)

    @property
    def full_steps(self) -> int:
        """Steps in which every rank has a full batch without padding."""
        return self.remaining // self.step_size

    @property
    def tail(self) -> int:
        """Samples after the full steps, in [0, step_size); 0 if they are dropped."""
        return 0 if self.drop_last else self.remaining % self.step_size

    @property
    def remainder(self) -> int:
        """Samples in the last global step that are not padding; -1 if a gather has nothing to drop."""
        return self.tail or -1

    def steps(self, rank: int) -> int:
        """Return the number of batches of ``rank``."""
        has_tail = self.tail > 0 if self.even_batches else self.tail > rank * self.batch_size
        return self.full_steps + int(has_tail)

    @property
    def samples(self) -> int:
        """Samples of the stream that are handed out from ``start`` on."""
        return self.full_steps * self.step_size + self.tail

    def real_samples(self, rank: int, step: int) -> int:
        """Return the samples of the rank's batch in that step that are not padding, in [0, batch_size]."""
        if step < self.full_steps:
            return self.batch_size
        return min(self.batch_size, max(0, self.tail - rank * self.batch_size))

    def ranges(self, rank: int, step: int) -> list[range]:
        """Positions of the rank's batch in that step, as runs of consecutive positions.

        There is one run, except in the last step of uneven data, where the padding wraps around to the start of the
        stream (repeatedly, if the data set is smaller than a step).
        """
        first = self.start + step * self.step_size + rank * self.batch_size
        last = first + self.batch_size
        if last <= self.length:
            return [range(first, last)]
        if not self.even_batches:
            return [range(first, self.length)]
        return list(wrapped_ranges(first, last, self.length))

    def position_after(self, steps: int) -> int:
        """Position after that many global steps from the start, at most ``length``."""
        return min(self.start + steps * self.step_size, max(self.start, self.length))


def wrapped_ranges(first: int, last: int, length: int) -> Iterator[range]:
    """Split positions [first, last) at multiples of ``length`` and fold each piece back into [0, length)."""
    while first < last:
        offset = first % length
        stop = min(length, offset + last - first)
        yield range(offset, stop)
        first += stop - offset


def balanced_range(total: int, num_processes: int, rank: int) -> range:
    """Return the rank-th of ``num_processes`` consecutive pieces of [0, total), whose sizes differ by at most one."""
    return range(*share_bounds(total, rank, num_processes))


def per_process_batch_size(batch_size: int, num_processes: int) -> int:
    """Batch size of each rank when ``batch_size`` is the global one (split_batches)."""
    if batch_size % num_processes == 0:
        return batch_size // num_processes
    below = batch_size // num_processes * num_processes
    nearest = f"{below} or {below + num_processes}" if below else f"{num_processes}"
    raise ConfigurationError(
        f"split_batches=True divides each batch among the processes, and a batch size of {batch_size} cannot be "
        f"divided among {num_processes} processes. Use a batch size of {nearest}, or split_batches=False with the "
        "batch size of one process."
    )

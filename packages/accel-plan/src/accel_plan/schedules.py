"""The order in which a pipeline's ranks run forward and backward passes, and how long it takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

TIMED_SCHEDULES = ("1f1b", "gpipe", "interleaved1f1b")
"""Schedules whose order is known here."""


@dataclass(frozen=True)
class _Task:
    backward: bool
    stage: int
    micro_batch: int


def schedule_seconds(
    schedule: str, forward: Sequence[float], backward: Sequence[float], micro_batches: int, stages: int, message: float
) -> float:
    """Return seconds until all ranks have run all passes of a batch.

    Args:
        schedule: one of :data:`TIMED_SCHEDULES`.
        forward, backward: seconds of a micro batch in all stages of each rank.
        micro_batches: number of micro batches.
        stages: per rank.
        message: seconds in which the output of a stage reaches the next one.
    """
    size = len(forward)
    queues = [_order(schedule, rank, size, micro_batches, stages) for rank in range(size)]
    ended: dict[_Task, float] = {}
    clocks, last = [0.0] * size, size * stages - 1
    positions = [0] * size
    while any(position < len(queue) for position, queue in zip(positions, queues, strict=True)):
        moved = False
        for rank, queue in enumerate(queues):
            while positions[rank] < len(queue):
                task = queue[positions[rank]]
                needed = _needed(task, last)
                if any(one not in ended for one in needed):
                    break
                arrived = (ended[one] + (message if one.stage % size != rank else 0.0) for one in needed)
                start = max([clocks[rank], *arrived])
                seconds = backward[rank] if task.backward else forward[rank]
                ended[task] = clocks[rank] = start + seconds / stages
                positions[rank] += 1
                moved = True
        if not moved:
            raise RuntimeError(f"the order of {schedule} on {size} ranks waits for itself")
    return max(clocks)


def _needed(task: _Task, last: int) -> list[_Task]:
    """Return what must have ended: the pass of the stage before, or after.

    A backward pass also needs its forward pass.
    """
    if not task.backward:
        return [_Task(False, task.stage - 1, task.micro_batch)] if task.stage else []
    needed = [_Task(False, task.stage, task.micro_batch)]
    return needed if task.stage == last else [*needed, _Task(True, task.stage + 1, task.micro_batch)]


def _order(schedule: str, rank: int, size: int, micro_batches: int, stages: int) -> list[_Task]:
    """Return the passes of a rank: some forward passes, then one forward and one backward pass in turns, then the rest.

    Source: Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters, arXiv:2104.04473,
    section 2.2.
    """
    number = micro_batches * stages
    first = {
        "gpipe": number,
        "1f1b": size - rank - 1,
        "interleaved1f1b": 2 * (size - rank - 1) + (stages - 1) * size,
    }[schedule]
    forwards = [_task(False, index, rank, size, stages) for index in range(number)]
    backwards = [_task(True, index, rank, size, stages) for index in range(number)]
    first = min(first, number)
    order = forwards[:first]
    for forward, backward in zip(forwards[first:], backwards, strict=False):
        order += [forward, backward]
    return order + backwards[number - first :]


def _task(backward: bool, index: int, rank: int, size: int, stages: int) -> _Task:
    """Return the pass with this index on a rank: as many micro batches as ranks in one stage, then the next stage."""
    if stages == 1:
        return _Task(backward, rank, index)
    group, position = divmod(index, size * stages)
    chunk, offset = divmod(position, size)
    chunk = stages - 1 - chunk if backward else chunk
    return _Task(backward, chunk * size + rank, group * size + offset)

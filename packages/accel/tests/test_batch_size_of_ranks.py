"""find_executable_batch_size on several ranks: all take the same batch size, or end with the same cause."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from accel import Accelerator, find_executable_batch_size
from accel_state.memory import NoExecutableBatchSizeError
from accel_state.testing import run_world

pytestmark = pytest.mark.timeout(300)


def find(limits: list[int], in_the_middle: bool) -> Any:
    """The batch sizes that this rank tried, and the result of the last; rank i has memory for ``limits[i]``."""
    accelerator = Accelerator(cpu=True)
    tried: list[int] = []

    @find_executable_batch_size(starting_batch_size=16, reduce_batch_size_fn=lambda size: size // 2)
    def train(batch_size: int) -> int:
        tried.append(batch_size)
        if in_the_middle:
            dist.all_reduce(torch.ones(1))
        if batch_size > limits[accelerator.process_index]:
            raise torch.OutOfMemoryError("out of memory")
        return batch_size

    first = train()
    return tried, first, train(), tried[-1]


@pytest.mark.parametrize(
    ("limits", "sizes"),
    [([99, 99], [16]), ([16, 4], [16, 8, 4]), ([4, 16], [16, 8, 4]), ([8, 8], [16, 8])],
)
def test_all_ranks_take_what_fits_on_each(limits: list[int], sizes: list[int]) -> None:
    expected = ([*sizes, sizes[-1]], sizes[-1], sizes[-1], sizes[-1])
    assert run_world(find, 2, limits, False) == run_world(find, 2, limits, True) == [expected] * 2


def alone() -> str:
    """Rank 1 runs out of memory while rank 0 waits for it."""
    accelerator = Accelerator(cpu=True)

    @find_executable_batch_size(starting_batch_size=16)
    def train(batch_size: int) -> None:
        if accelerator.process_index == 1:
            raise torch.OutOfMemoryError("out of memory")
        dist.all_reduce(torch.ones(1))

    try:
        train()
    except NoExecutableBatchSizeError as error:
        accelerator.end_training()  # as at the end of the process: rank 0 fails
        return str(error)
    except RuntimeError as error:  # rank 1 has ended
        return type(error).__name__
    return "none"


def test_a_rank_that_others_wait_for_ends_with_their_lines() -> None:
    _, text = run_world(alone, 2, env={"ACCELERATE_HANG_REPORT_SECONDS": "0.5"})
    assert "ran out of memory on this rank only, at batch size 16: out of memory" in text
    assert "rank 0: in all_reduce for" in text and "waits for rank 1" in text
    assert "starting_batch_size" in text

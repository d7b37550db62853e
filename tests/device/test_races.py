"""The instrument itself: every wrong program is seen, by its numbers or by a report, and no right one is."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import race_programs
import torch

PROGRAMS = [name for name in vars(race_programs) if name.startswith(("right_", "wrong_"))]
# Operators run at once, so of these only the vector clocks know.
REPORTED_ONLY = {
    "wrong_frees_block_that_another_streams_kernel_reads",
    "wrong_copies_to_another_device_before_the_write",
}


@pytest.fixture(autouse=True)
def races() -> Iterator[None]:
    torch.simgpu.synchronize()
    torch.simgpu.clear_races()
    yield
    torch.simgpu.synchronize()
    torch.simgpu.clear_races()


def _is_right(name: str) -> bool:
    return getattr(race_programs, name)()


@pytest.mark.expects_races
@pytest.mark.parametrize("name", [name for name in PROGRAMS if name.startswith("wrong_")])
def test_wrong_program(name: str) -> None:
    right = _is_right(name)
    assert right == (name in REPORTED_ONLY)
    if right:
        assert torch.simgpu.races()


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name.startswith("right_")])
def test_right_program(name: str) -> None:
    assert _is_right(name)
    assert torch.simgpu.races() == []


def test_there_are_eight_of_each() -> None:
    assert len(PROGRAMS) == 16


def test_copies_are_late_until_something_asks_for_them() -> None:
    host = torch.full((8,), 3.0).pin_memory()
    x = host.to("simgpu", non_blocking=True)
    assert torch.simgpu.queued_copies() == 1
    assert (x + 0).cpu().tolist() == [3.0] * 8
    assert torch.simgpu.queued_copies() == 0


@pytest.mark.expects_races
def test_early_free_is_poisoned_for_those_who_still_read() -> None:
    before = torch.simgpu.counters()["early_frees"]
    assert not race_programs.wrong_frees_without_record_stream()
    assert torch.simgpu.counters()["early_frees"] == before + 1
    assert "freed without record_stream" in torch.simgpu.races()[0]

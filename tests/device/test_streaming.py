"""Weights that are streamed to the device, and values that are logged from it, with copies as late as CUDA allows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from accel_bigmodel import cpu_offload, disk_offload
from accel_bigmodel.offload import staging
from accel_state.context import isolated
from accel_track.snapshot import Snapshot

DEVICE = torch.device("simgpu", 0)


@pytest.fixture(autouse=True)
def fresh_state(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(staging, "_BUFFER_BYTES", 5_000)  # each weight takes several turns of the two buffers
    with isolated():
        yield


@pytest.mark.parametrize("where", ["memory", "disk"])
def test_streamed_weights_are_those_that_were_given(where: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Linear(40, 40) for _ in range(6)))
    x = torch.randn(3, 40)
    with torch.no_grad():
        expected = plain(x)
        model = nn.Sequential(*(nn.Linear(40, 40) for _ in range(6)))
        model.load_state_dict(plain.state_dict())
        model = cpu_offload(model, DEVICE) if where == "memory" else disk_offload(model, tmp_path / "o", DEVICE)
        before = torch.simgpu.counters()["queued"]
        for _ in range(4):
            torch.testing.assert_close(model(x.to(DEVICE)).cpu(), expected)
        assert torch.simgpu.counters()["queued"] - before > 20, "copies that could be late"
    assert torch.simgpu.races() == []


def test_logged_values_are_those_of_their_step() -> None:
    side = torch.Stream(DEVICE)
    side.wait_stream(torch.simgpu.current_stream())
    taken = []
    with torch.simgpu.stream(side):
        value = torch.zeros(100, device=DEVICE)
        for step in range(4):
            value.fill_(step)
            taken.append(Snapshot({"value": value}))
            value.fill_(-1)
    for step, values in enumerate(taken):  # as the thread does that delivers them
        assert values.values()["value"].unique().tolist() == [step]

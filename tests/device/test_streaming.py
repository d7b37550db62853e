"""Weights that are streamed to the device, and values that are logged from it, with copies as late as CUDA allows."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accel import Accelerator
from accel.fault_tolerance.run_state import capture
from accel_bigmodel import cpu_offload, disk_offload
from accel_bigmodel.offload import staging
from accel_monitor.bad_steps import BadSteps
from accel_monitor.recorder import LOSS, NORM, Recorder
from accel_monitor.values import DeviceValues, number
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


@pytest.mark.parametrize("missing", ["Event", "Stream", "stream", "current_stream"])
def test_copies_wait_on_a_device_without_all_parts_of_streams(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.simgpu, missing)
    model, x, logged = nn.Sequential(*(nn.Linear(40, 40) for _ in range(3))), torch.randn(3, 40), torch.ones(3)
    with torch.no_grad():
        expected = model(x)
        torch.testing.assert_close(cpu_offload(model, DEVICE)(x.to(DEVICE)).cpu(), expected)
        snapshot = Snapshot({"value": logged.to(DEVICE)})
    assert snapshot.values()["value"].tolist() == [1.0] * 3


@pytest.mark.parametrize("place", [DEVICE, torch.device("simgpu", 1)], ids=str)
def test_weights_that_are_offloaded_to_a_device_are_read_when_they_were_written(place: torch.device) -> None:
    with torch.no_grad():
        model = nn.Sequential(*(nn.Linear(40, 40, bias=False) for _ in range(4)))
        weights = {name: torch.zeros(40, 40, device=place) for name in model.state_dict()}
        model, x = cpu_offload(model, DEVICE, state_dict=weights), torch.ones(2, 40, device=DEVICE)
        for value in (1.0, 0.5, 2.0):
            for weight in weights.values():
                weight.copy_(torch.full((40, 40), value / 40).pin_memory(), non_blocking=True)
            assert model(x).unique().tolist() == pytest.approx([value**4])
    assert torch.simgpu.races() == []


def test_memory_of_weights_on_the_device_is_kept_while_they_are_copied() -> None:
    copies = staging.StagedCopies(DEVICE, 1 << 16)
    for value in (1.0, 2.0, 3.0):
        sent, arrival = copies.send({"weight": torch.full((64, 32), value, device=DEVICE)})
        torch.zeros(64, 32, device=DEVICE)  # may not take the memory of the weight yet
        copies.receive(sent, arrival)
        assert sent["weight"].unique().tolist() == [value]
    assert torch.simgpu.races() == []


class Scaled(torch.Tensor):
    """A weight as quantization libraries make them: small numbers and a scale, each with memory of its own."""

    @staticmethod
    def __new__(cls, numbers: torch.Tensor, scale: torch.Tensor) -> Scaled:
        self = torch.Tensor._make_wrapper_subclass(cls, numbers.shape, dtype=scale.dtype, device=scale.device)
        self.numbers, self.scale = numbers, scale
        return self

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["numbers", "scale"], None

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten._to_copy.default:
            return cls(*(function(part, **kwargs) for part in (args[0].numbers, args[0].scale)))
        if function is torch.ops.aten.detach.default:
            return cls(args[0].numbers, args[0].scale)
        raise NotImplementedError(function)


class WithState(torch.Tensor):
    """A weight whose scale is an attribute, as those of bitsandbytes are."""

    def to(self, *args: Any, **kwargs: Any) -> WithState:
        moved = self.as_subclass(torch.Tensor).to(*args, **kwargs).as_subclass(WithState)
        moved.scale = self.scale.to(*args, **kwargs)
        return moved


def _quantized(kind: str) -> torch.Tensor:
    numbers, scale = torch.full((64, 32), 3.0).pin_memory(), torch.full((64, 1), 0.5).pin_memory()
    if kind == "inner":
        return Scaled(numbers, scale)
    weight = numbers.as_subclass(WithState)
    weight.scale = scale
    return weight


@pytest.mark.parametrize("kind", ["inner", "attribute"])
def test_the_memory_inside_of_a_quantized_weight_is_kept_while_it_is_read(kind: str) -> None:
    copies = staging.StagedCopies(DEVICE, 1 << 16)
    with torch.no_grad():
        for _ in range(3):
            given, before = _quantized(kind), torch.simgpu.counters()["blocking"]
            values, arrival = copies.send({"weight": given})
            copies.receive(values, arrival)
            assert torch.simgpu.counters()["blocking"] == before
            weight: Any = values["weight"]
            numbers = weight.numbers if kind == "inner" else weight.as_subclass(torch.Tensor)
            result = numbers * weight.scale
            # Their memory is free for the next copies, which must not overwrite what the product reads.
            del values, weight, numbers
            copies.send({"weight": _quantized(kind)})
            assert result.unique().tolist() == [1.5]
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


def test_a_state_for_another_replica_is_that_of_the_loops_stream() -> None:
    """As torchft asks for it: in a thread."""
    accelerator = Accelerator()
    layer = accelerator.prepare(nn.Linear(64, 64))
    layer.register_buffer("count", torch.zeros(64, device=DEVICE))
    side = torch.Stream(DEVICE)
    side.wait_stream(torch.simgpu.current_stream())
    with torch.simgpu.stream(side), torch.no_grad(), ThreadPoolExecutor(1) as torchft:
        for value in (1.0, 2.0):
            for tensor in (layer.weight, layer.bias, layer.count):
                tensor.copy_(torch.full(tensor.shape, value).pin_memory(), non_blocking=True)
            (state,) = torchft.submit(capture, accelerator).result()["models"]
            sent = torchft.submit(lambda state=state: [tensor.cpu() for tensor in state.values()]).result()
            assert [tensor.unique().tolist() for tensor in sent] == [[value]] * 3
    assert torch.simgpu.races() == []


def test_losses_that_the_monitor_looks_at_are_those_of_their_step() -> None:
    recorder, values = Recorder(), DeviceValues(DEVICE)
    bad = BadSteps(recorder)
    side = torch.Stream(DEVICE)
    side.wait_stream(torch.simgpu.current_stream())
    with torch.simgpu.stream(side):
        loss, norm = torch.zeros((), device=DEVICE), torch.zeros((), device=DEVICE)
        for step in range(1, 30):
            loss.fill_(float("inf") if step == 12 else step)
            norm.fill_(100.0 if step == 20 else 1.0)
            recorder.note(LOSS, values.take(loss))
            recorder.note(NORM, values.take(norm))
            recorder.step_done()
            loss.fill_(float("nan"))  # as the next replay of a graph does
            norm.fill_(float("nan"))
        values.settle(5.0)
        with ThreadPoolExecutor(1) as monitor:  # its current stream is not that of the loop
            found = monitor.submit(bad.check).result()
            assert monitor.submit(number, recorder.loss).result() == 29
    assert [(event["step"], event["what"]) for event in found] == [(12, "loss"), (20, "norm")]
    assert torch.simgpu.races() == []

"""accel-monitor on a device: parts of a step by events, which nothing waits for."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from accel import Accelerator
from accel_monitor import Part, read_runs
from accel_monitor.bad_steps import BadSteps
from accel_monitor.device_times import DeviceTimes
from accel_monitor.recorder import LOSS, Recorder
from accel_monitor.values import DeviceValues, is_known

DEVICE = torch.device("simgpu", 0)
STEPS = 24


class Net(nn.Module):
    """A linear layer. The simulated GPU computes when the host queues, so that this pause is one of the device."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        time.sleep(0.02)
        return self.layer(inputs)


def train(folder: Path, monitor: bool) -> tuple[torch.Tensor, dict[str, int], Accelerator]:
    accelerator = Accelerator(monitor=monitor, project_dir=folder)
    torch.manual_seed(0)
    model = Net()
    data = torch.arange(STEPS * 8.0).reshape(-1, 4) / 100
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.01), DataLoader(data, batch_size=2)
    )
    before = torch.simgpu.counters()
    for inputs in loader:
        accelerator.backward(model(inputs).mean())
        optimizer.step()
        optimizer.zero_grad()
    after = torch.simgpu.counters()
    return model.layer.weight.detach().cpu(), {name: after[name] - before[name] for name in after}, accelerator


def test_a_devices_events_divide_the_steps_and_nothing_waits(tmp_path: Path) -> None:
    plain, unmeasured, _ = train(tmp_path, False)
    weights, counts, accelerator = train(tmp_path, True)
    monitor = accelerator._monitor._monitor
    torch.testing.assert_close(weights, plain, rtol=0, atol=0)
    records = monitor._recorder.latest()
    # The simulated GPU says of an event three times that it has not happened: the first steps are still the host's.
    assert [record.on_device for record in records] == sorted(record.on_device for record in records)
    measured = [record for record in records if record.on_device]
    assert len(measured) >= STEPS - 6
    assert all(record.seconds[Part.FORWARD] >= 0.02 for record in measured)
    # Of all steps: a busy machine makes some longer, while what waits in the forward would be in each.
    assert min(record.seconds[Part.BACKWARD] for record in measured) < 0.02
    snapshot = monitor.snapshot()
    assert sum(snapshot.seconds) == pytest.approx(snapshot.elapsed)
    # The loop copies losses, and nothing waits for them: not the loop, and not the thread that looks at them.
    assert counts["device_to_host"] - unmeasured["device_to_host"] == STEPS
    assert counts["blocking"] == unmeasured["blocking"]
    before = torch.simgpu.counters()["blocking"]
    accelerator.end_training()
    assert torch.simgpu.counters()["blocking"] == before
    (run,) = read_runs(tmp_path)
    assert not any("those of the host" in note for note in run.notes)
    assert torch.simgpu.races() == []


def short_steps(recorder: Recorder, count: int) -> None:
    for _ in range(count):
        for part in (Part.DATA, Part.FORWARD, Part.BACKWARD, Part.OPTIMIZER):
            recorder.mark(part)
        recorder.step_done()


def test_short_steps_are_measured_now_and_then() -> None:
    recorder = Recorder()
    times = DeviceTimes(recorder, DEVICE, pytest.fail)
    began = time.perf_counter()
    short_steps(recorder, 400)
    measured = {id(record.seconds): record for record in recorder.latest() if record.on_device}
    distinct = {tuple(record.seconds) for record in measured.values()}
    # At most one in 10 ms.
    assert len(distinct) <= (time.perf_counter() - began) / 0.01 + 1
    assert len(times.pending) <= 8


def test_a_device_whose_events_have_no_times_is_measured_by_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.simgpu, "Event", lambda enable_timing: torch.Event(DEVICE))
    reasons: list[str] = []
    recorder = Recorder()
    DeviceTimes(recorder, DEVICE, reasons.append)
    for _ in range(12):
        short_steps(recorder, 1)
        time.sleep(0.011)
    assert len(reasons) == 1 and "timing" in reasons[0]
    assert not any(record.on_device for record in recorder.latest()) and recorder.step == 12


def test_a_loss_is_read_when_the_device_has_copied_it_and_nothing_waits() -> None:
    recorder, values = Recorder(), DeviceValues(DEVICE)
    bad = BadSteps(recorder)
    before = torch.simgpu.counters()["blocking"]
    for loss in (1.0, float("nan"), 2.0):
        recorder.note(LOSS, values.take(torch.full((), loss, device=DEVICE)))
        recorder.step_done()
    assert not is_known(recorder.latest()[-1].loss)
    assert bad.check() == [] and bad.loss is None  # none is there: the device says so a few times
    recorder.forget(1)  # as the thread does after each look
    values.settle(5.0)
    assert [event["step"] for event in bad.check()] == [2] and bad.loss == 2.0
    assert torch.simgpu.counters()["blocking"] == before
    assert values.take(torch.zeros(2, device=DEVICE)) is None and values.take(torch.tensor(3.0)) == 3.0
    assert torch.simgpu.races() == []

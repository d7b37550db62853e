"""The values that the monitor adds to those that a script logs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from written_runs import Clock

from accel_monitor.parts import Part
from accel_monitor.recorder import SAMPLES, TOKENS, Recorder
from accel_monitor.tracked import LOGGED_STEPS, TrackedValues


def steps(recorder: Recorder, count: int) -> None:
    for _ in range(count):
        recorder.step_done()


def test_values_are_means_over_the_steps_since_the_last_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    recorder = Recorder()
    tracked = TrackedValues(recorder, 2)
    tracked.seconds_at_peak = 0.01
    assert tracked.due(None, None) == {}
    recorder.note(SAMPLES, 1000)
    recorder.note(TOKENS, 5000)
    clock.spend(recorder, Part.FORWARD, 2.0)
    clock.spend(recorder, Part.WAITING, 0.5)
    clock.spend(recorder, Part.SAVING, 9.0)  # no part of a step
    steps(recorder, LOGGED_STEPS)
    found = tracked.due(2**30, 1)
    assert found["monitor/forward_seconds"] == pytest.approx(2.0 / LOGGED_STEPS)
    assert found["monitor/waiting_seconds"] == pytest.approx(0.5 / LOGGED_STEPS)
    assert found["monitor/step_seconds"] == pytest.approx(2.5 / LOGGED_STEPS)
    assert found["monitor/samples_per_second"] == pytest.approx(400) and found["monitor/mfu"] == pytest.approx(0.2)
    assert found["monitor/tokens_per_second"] == pytest.approx(2000)
    assert found["monitor/memory_bytes"] == 2**30 and found["monitor/slow_rank"] == 1
    assert "monitor/saving_seconds" not in found and tracked.due(None, None) == {}
    steps(recorder, LOGGED_STEPS - 1)
    assert tracked.due(None, None) == {}
    clock.spend(recorder, Part.FORWARD, 3.0)
    steps(recorder, 1)
    found = tracked.due(None, None)
    assert found["monitor/step_seconds"] == pytest.approx(3.0 / LOGGED_STEPS) and found["monitor/slow_rank"] == -1
    assert "monitor/tokens_per_second" not in found and "monitor/memory_bytes" not in found
    recorder.begin_at(3)
    assert tracked.due(None, None) == {}
    clock.spend(recorder, Part.FORWARD, 1.0)
    steps(recorder, LOGGED_STEPS)
    assert tracked.due(None, None)["monitor/step_seconds"] == pytest.approx(1.0 / LOGGED_STEPS)


def logged(folder: Path, monitor: bool) -> list[dict[str, float]]:
    from accel import Accelerator
    from accel.tracking import GeneralTracker

    class Memory(GeneralTracker):
        """Keeps what it gets."""

        name, requires_logging_directory, tracker = "memory", False, None

        def __init__(self) -> None:
            super().__init__()
            self.lines: list[dict[str, float]] = []

        def store_init_configuration(self, values: dict) -> None:
            """Nothing to keep."""

        def log(self, values: dict, step: int | None = None, **kwargs: object) -> None:
            self.lines.append({"step": step, **values})

    tracker = Memory()
    accelerator = Accelerator(cpu=True, monitor=monitor, project_dir=folder, log_with=tracker)
    accelerator.init_trackers("run")
    model = nn.Linear(4, 1)
    data = DataLoader(TensorDataset(torch.ones(2 * LOGGED_STEPS + 10, 4)), batch_size=1)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01), data)
    for number, (inputs,) in enumerate(loader, 1):
        accelerator.backward(model(inputs).mean())
        optimizer.step()
        if number % 20 == 0:
            accelerator.log({"number": number}, step=7 * number)
    accelerator.end_training()
    return tracker.lines


def test_a_script_that_logs_gets_them_with_its_own_steps(tmp_path: Path) -> None:
    pytest.importorskip("accel")
    plain, lines = logged(tmp_path, False), logged(tmp_path, True)
    own = [{name: value for name, value in line.items() if not name.startswith("monitor/")} for line in lines]
    assert own == plain == [{"step": 7 * number, "number": number} for number in range(20, 2 * LOGGED_STEPS + 1, 20)]
    # The third call is the first after 50 steps, and the next 50 are not complete at the last.
    assert ["monitor/step_seconds" in line for line in lines] == [False, False, True, False, False]
    assert all(isinstance(value, float) for name, value in lines[2].items() if name.startswith("monitor/"))
    assert json.loads((tmp_path / "monitor" / "rank-00000.jsonl").read_text().splitlines()[-1])["step"] == 110

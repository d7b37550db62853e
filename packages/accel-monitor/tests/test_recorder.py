"""What the loop notes, and what is left of it after a kill."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from written_runs import Clock

from accel_monitor.counters import NUMBERS, STEP, Counters, load
from accel_monitor.live import remove_live
from accel_monitor.parts import Part
from accel_monitor.recorder import DRAWN, INDICES, LOSS, RECENT_STEPS, SAMPLES, Drawn, Recorder
from accel_monitor.reporter import Reporter


def memory() -> memoryview[float]:
    return memoryview(bytearray(8 * NUMBERS)).cast("d")


def test_parts_and_values_belong_to_their_step(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    recorder = Recorder()
    recorder.compares = False
    for step in range(3):
        clock.spend(recorder, Part.DATA, 1.0)
        recorder.note(INDICES, [step])
        recorder.note(SAMPLES, 4)
        clock.spend(recorder, Part.FORWARD, 2.0 + step)
        recorder.note(LOSS, 0.5 * step)
        assert recorder.part == Part.FORWARD
        clock.spend(recorder, Part.OPTIMIZER, 0.25)
        recorder.step_done()
    clock.now += 5.0
    snapshot = recorder.snapshot()
    assert (snapshot.step, snapshot.samples, snapshot.part, snapshot.step_at) == (3, 12, Part.OTHER, 12.75)
    assert snapshot.seconds[Part.FORWARD] == 9.0 and snapshot.seconds[Part.OTHER] == 5.0
    assert sum(snapshot.seconds) == snapshot.elapsed == 17.75
    records = recorder.latest()
    assert [record.seconds[Part.FORWARD] for record in records] == [2.0, 3.0, 4.0]
    assert [(record.step, record.loss, record.indices) for record in records] == [
        (1, 0.0, [[0]]),
        (2, 0.5, [[1]]),
        (3, 1.0, [[2]]),
    ]
    assert recorder.part == Part.OTHER  # nothing is noted that is not added up


def test_a_thread_that_hangs_costs_no_memory() -> None:
    recorder = Recorder()
    for _ in range(20_000):
        recorder.mark(Part.DATA)
        recorder.step_done()
    assert len(recorder._queue) < 40_000 and len(recorder._recent) <= RECENT_STEPS
    assert recorder.snapshot().step == 20_000


def test_a_signal_handler_may_note_between_a_part_and_its_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    recorder = Recorder()
    recorder.append(Part.DATA)  # as the loop does, whose reading comes after those of the handler
    recorder.add_up()
    assert recorder.part == Part.STARTUP
    clock.spend(recorder, Part.SAVING, 2.0)
    recorder.note(SAMPLES, 4)
    recorder.mark(Part.OTHER)
    assert recorder.part == Part.OTHER
    recorder.append(clock.now)
    clock.now += 1.0
    snapshot = recorder.snapshot()
    assert (snapshot.part, snapshot.samples, snapshot.seconds[Part.SAVING]) == (Part.DATA, 4, 2.0)
    assert snapshot.seconds[Part.DATA] == 1.0


def test_indices_are_those_of_the_iteration_that_handed_them_out() -> None:
    recorder = Recorder()
    drawn = [Drawn(), Drawn()]
    for epoch in range(2):
        for number in range(3):
            drawn[epoch].batches[number] = [epoch, number]
    for which in (0, 1, 0):
        recorder.extend((DRAWN, drawn[which]))
        recorder.step_done()
    assert [record.indices for record in recorder.latest()] == [[[0, 0]], [[1, 0]], [[0, 1]]]
    assert drawn[0].batches == {2: [0, 2]}  # drawn ahead


def test_a_kill_loses_no_step_and_leaves_no_mixture(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, shared = Clock(monkeypatch), memory()
    recorder = Recorder()
    recorder.use(shared)
    clock.spend(recorder, Part.FORWARD, 2.0)
    recorder.step_done()
    recorder.add_up()
    clock.spend(recorder, Part.DATA, 3.0)
    recorder.step_done()
    found = load(shared)  # the second step is counted, its seconds are not added up
    assert found is not None and found.step == 2 and found.seconds[Part.FORWARD] == sum(found.seconds) == 2.0
    before = shared.tolist()
    recorder.add_up()
    after = shared.tolist()
    # As many of the numbers as a kill may leave: the last one makes the others valid.
    changed = [index for index in range(NUMBERS) if before[index] != after[index] and index != 0]
    for count in range(len(changed) + 1):
        torn = memory()
        for index in range(NUMBERS):
            torn[index] = after[index] if index in changed[:count] else before[index]
        left = load(torn)
        assert left is not None and left.step == 2 and sum(left.seconds) == 2.0
    whole = load(shared)
    assert whole is not None and whole.seconds[Part.DATA] == 3.0 and whole.step == 2


def test_memory_that_is_none() -> None:
    broken = memory()
    Counters(1.0, 1.0).save(broken)
    assert load(broken) is not None
    for number in (float("nan"), -1.0):
        broken[STEP] = number
        assert load(broken) is None
    broken[STEP], broken[0] = 0.0, 7.0
    assert load(broken) is None


def test_a_long_start_does_not_delay_the_reports_of_short_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    recorder = Recorder()
    identity = {"replica": None, "rank": 0, "world_size": 2, "device": "cpu", "step": 0}
    reporter = Reporter(recorder, tmp_path, 2.0, identity, None, torch.device("cpu"))
    clock.now += 30.0
    for _ in range(5):
        clock.spend(recorder, Part.FORWARD, 0.02)
        recorder.step_done()
    reporter._recent({"queued": 0.0})
    # Six steps: a slow rank is to be found within twenty.
    assert reporter._pause == pytest.approx(0.12)
    remove_live(reporter._start["live"])

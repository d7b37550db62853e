"""Which rank the others wait for: found by comparing reports, in synthetic steps and in real ones."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from accel_monitor import make_ledger, read_runs
from accel_monitor.html import page
from accel_monitor.ledger import Cause
from accel_monitor.live import remove_live
from accel_monitor.parts import Part
from accel_monitor.recorder import Recorder, StepRecord
from accel_monitor.records import encode_now, file_name
from accel_monitor.report import report
from accel_monitor.reporter import Reporter
from accel_monitor.stragglers import OwnParts, Recent, Watch, decode_recent, encode_recent, find_straggler
from accel_state.testing import run_world


def reports(
    world: int, seed: int, slow: int | None = None, column: int = 0, extra: float = 0.0, noise: float = 0.05
) -> dict[int, Recent]:
    """Reports of 28 steps of 20 ms by ranks that report at different moments, one of them slower."""
    drawn = random.Random(seed)
    found = {}
    for rank in range(world):
        rows = []
        for _ in range(28):
            row = [0.002, 0.015, 0.003]
            if drawn.random() < 0.08:
                row[drawn.randrange(3)] += 0.04  # an interruption
            row = [value * drawn.gauss(1, noise) for value in row]
            if rank == slow:
                row[column] += extra
            rows.append(tuple(row))
        found[rank] = Recent("host", "cpu", 100 + drawn.randrange(10), rows, [0.0] * len(rows))
    return found


@pytest.mark.parametrize("world", [2, 4, 64])
@pytest.mark.parametrize(("column", "part"), [(0, "data"), (1, "compute"), (2, "host")])
def test_a_rank_that_is_slow_in_one_part_is_named_with_it(world: int, column: int, part: str) -> None:
    for seed in range(40):
        slow = seed % world
        found = find_straggler(reports(world, seed, slow, column, 0.014))
        assert found is not None and (found.rank, found.part) == (slow, part), seed
        assert found.seconds == pytest.approx(0.014, rel=0.5) and found.last - found.first == 15


@pytest.mark.parametrize("world", [2, 4, 64])
def test_interruptions_and_noise_name_no_rank(world: int) -> None:
    assert not any(find_straggler(reports(world, seed)) for seed in range(200))


def test_a_rank_without_a_processor_and_too_few_common_steps() -> None:
    ranks = reports(3, 0)
    ranks[1] = Recent("other", "cpu", ranks[1].step, ranks[1].own, [0.02] * 28)
    found = find_straggler(ranks)
    assert found is not None and (found.rank, found.part, found.host) == (1, "host", "other")
    far = reports(2, 0, 1, 0, 0.05)
    far[1] = Recent("host", "cpu", far[0].step + 24, far[1].own, far[1].held)
    assert find_straggler(far) is None and find_straggler({0: far[0]}) is None


def test_a_processor_that_is_away_in_a_few_steps_names_no_rank() -> None:
    """The mean of such steps is large; the steps say that most were not affected."""
    ranks = reports(2, 1, noise=0.0)
    ranks[1] = Recent("host", "cpu", ranks[1].step, ranks[1].own, [0.1 if step % 4 == 0 else 0.0 for step in range(28)])
    assert find_straggler(ranks) is None


def test_a_processor_that_is_away_in_every_other_short_step() -> None:
    """The scheduler gives the processor to another process for 3 ms at once."""
    ranks = {rank: Recent("host", "cpu", 100, [(0.0003, 0.004, 0.0002)] * 28, [0.0] * 28) for rank in range(2)}
    ranks[1] = Recent("host", "cpu", 100, ranks[1].own, [0.0, 0.003] * 14)
    found = find_straggler(ranks)
    assert found is not None and (found.rank, found.part) == (1, "host")


@pytest.mark.parametrize(("queued", "part"), [(0.0, "data"), (0.004, "data"), (0.012, "host")])
def test_data_that_takes_long_without_a_processor_is_the_hosts(queued: float, part: str) -> None:
    ranks = reports(2, 0, 1, 0, 0.014)
    slow = ranks[1]
    ranks[1] = Recent("host", "cpu", slow.step, slow.own, slow.held, queued, held_is_mean=True)
    found = find_straggler(ranks)
    assert found is not None and (found.rank, found.part) == (1, part)


def crowded(seed: int, slow: int, column: int, extra: float, ratios: tuple[float, float]) -> dict[int, Recent]:
    """Reports of two ranks that have no processor for so many times their processor time, one of them slower."""
    ranks = reports(2, seed, slow, column, extra, noise=0.02)
    for rank, recent in ranks.items():
        held = [ratios[rank] * row[1] for row in recent.own]
        queued = ratios[rank] * sum(map(sum, recent.own)) / len(held)
        ranks[rank] = Recent("host", "cpu", recent.step, recent.own, held, queued)
    return ranks


@pytest.mark.parametrize(("column", "part"), [(0, "data"), (1, "compute")])
def test_on_a_crowded_machine_more_work_is_not_the_hosts(column: int, part: str) -> None:
    """A rank that works more also lacks a processor for longer: in the same proportion as the others."""
    for seed in range(20):
        found = find_straggler(crowded(seed, 1, column, 0.02, (1.5, 1.5)))
        assert found is not None and (found.rank, found.part) == (1, part), seed
        assert find_straggler(crowded(seed, 1, column, 0.0, (1.5, 1.7))) is None, seed


def test_a_host_is_named_where_a_rank_lacks_a_processor_more_often_than_the_others() -> None:
    for seed in range(20):
        found = find_straggler(crowded(seed, 1, 0, 0.0, (0.1, 1.0)))
        assert found is not None and (found.rank, found.part) == (1, "host"), seed
        # Data that is prepared by the same thread takes longer there, too.
        found = find_straggler(crowded(seed, 1, 0, 0.004, (0.1, 1.0)))
        assert found is not None and (found.rank, found.part) == (1, "host"), seed


def records(passes: float, ran: float) -> list[StepRecord]:
    """Steps with a second of data, ``passes`` seconds of forward and so many of processor time."""
    found = []
    for step in range(4):
        seconds = [0.0] * len(Part)
        seconds[Part.DATA], seconds[Part.FORWARD], seconds[Part.WAITING] = 1.0, passes, 0.5
        found.append(StepRecord(step, seconds, ran, None, None, None, None))
    return found


@pytest.mark.parametrize(
    ("own_parts", "held", "is_mean"),
    [
        (OwnParts.ALL, [0.3, 0.3, 0.2, 0.2], False),
        (OwnParts.COMPUTE, [0.07] * 4, True),
        (OwnParts.DEVICE, [0.0] * 4, False),
    ],
)
def test_time_without_a_processor_is_that_of_the_passes_or_the_kernels_mean(
    own_parts: OwnParts, held: list[float], is_mean: bool
) -> None:
    sent = encode_recent(records(0.5, 0.3), own_parts, [0.3, 0.3, 0.07, 0.07])
    recent = decode_recent({"host": "a", "device": "cpu", "recent": sent})
    assert recent is not None and (recent.step, recent.queued, recent.held_is_mean) == (3, 0.07, is_mean)
    assert list(recent.held) == pytest.approx(held)
    if own_parts is OwnParts.DEVICE:
        return
    assert [row[:2] for row in recent.own] == [pytest.approx((1.0, 0.3))] * 4


def test_each_step_has_the_kernels_mean_of_the_reports_around_it(tmp_path: Path) -> None:
    recorder = Recorder()
    identity = {"replica": None, "rank": 0, "world_size": 2, "device": "cpu", "step": 0}
    reporter = Reporter(recorder, tmp_path, 2.0, identity, None, torch.device("cpu"))
    reporter.own_parts = OwnParts.ALL

    def reported(steps: int, queued: float) -> list[float]:
        for _ in range(steps):
            recorder.step_done()
        recent = decode_recent({"host": "a", "device": "cpu", **reporter._recent({"queued": queued})})
        assert recent is not None
        return [round(held, 3) for held in recent.held]

    assert reported(2, 5.0) == [0.0, 0.0]  # of steps before the first report nothing is known
    assert reported(2, 5.2) == [0.0, 0.0, 0.1, 0.1]
    assert reported(0, 5.5) == [0.0, 0.0, 0.1, 0.1]  # no step has ended: it counts for the next ones
    assert reported(1, 5.6) == [0.0, 0.0, 0.1, 0.1, 0.4]
    recorder.begin_at(2)  # a state was loaded
    assert reported(1, 9.0)[-1] == 0.0
    remove_live(reporter._start["live"])


def write(folder: Path, rank: int, process: str, recent: Recent) -> None:
    rows = zip(recent.own, recent.held, strict=True)
    own = [round(value / 1e-5) for row, held in rows for value in (*row, held)]
    line = {"kind": "sample", "id": process, "at": 1.0, "host": "host", "device": "cpu"}
    line["recent"] = {"last": recent.step, "own": own, "queued": 0.0, "held_is_mean": recent.held_is_mean}
    (folder / f"{file_name(None, rank)}.now").write_bytes(encode_now(line))


def test_reports_of_an_earlier_process_are_not_compared_and_a_rank_is_named_once(tmp_path: Path) -> None:
    ranks = reports(2, 3, 1, 0, 0.05)
    watch = Watch(tmp_path, None, 2)
    assert watch.check() is None  # no file yet
    for rank, recent in ranks.items():
        write(tmp_path, rank, "old", recent)
    assert watch.check() is None and watch.check() is None
    for rank, recent in ranks.items():
        write(tmp_path, rank, "new", recent)
    found = watch.check()
    assert found is not None and found.rank == 1 and "rank 1" in found.sentence()
    assert watch.check() is None and watch.named is not None
    quick = reports(2, 4)
    for rank, recent in quick.items():
        write(tmp_path, rank, "new", recent)
    for _ in range(20):
        assert watch.check() is None
    assert watch.named is None
    (tmp_path / f"{file_name(None, 0)}.now").write_text("{")
    assert watch.check() is None


def test_a_named_rank_is_not_named_again_where_its_parts_alternate(tmp_path: Path) -> None:
    watch, named = Watch(tmp_path, None, 2), []
    slow = {column: reports(2, 5, 1, column, 0.03, noise=0.0) for column in (0, 1)}
    turns = [turn % 2 for turn in range(14)] + [0] * 12
    for turn, column in enumerate(turns):
        for rank, recent in slow[column].items():
            write(tmp_path, rank, "run", Recent("host", "cpu", 200 + turn, recent.own, recent.held))
        named.append(watch.check())
    # Once with the first part, and once with the other when that stays.
    assert [found.part for found in named if found is not None] == ["compute", "data"]


@pytest.mark.parametrize(("mean", "needed"), [(False, 2), (True, 3)])
def test_a_rank_without_a_processor_is_named_by_several_reports_only(tmp_path: Path, mean: bool, needed: int) -> None:
    watch = Watch(tmp_path, None, 2)
    named = []
    for turn in range(5):
        for rank, recent in reports(2, 7, noise=0.0).items():
            waits = [0.03 if rank else 0.0] * 28
            held = Recent("host", "cpu", recent.step + turn, recent.own, waits, held_is_mean=mean)
            write(tmp_path, rank, "run", held)
        named.append(watch.check())
    # The first report of a process is not compared.
    assert [found is not None for found in named] == [turn == needed for turn in range(5)]
    assert named[needed].part == "host"


class Rows(Dataset):
    """Samples that take 25 ms each on rank 1, from the 20th on."""

    def __init__(self, rank: int) -> None:
        self.rank, self.count = rank, 0

    def __len__(self) -> int:
        return 240

    def __getitem__(self, index: int) -> torch.Tensor:
        self.count += 1
        if self.rank == 1 and self.count > 20:
            time.sleep(0.025)
        return torch.ones(64)


def train(folder: str) -> None:
    from accel import Accelerator

    accelerator = Accelerator(monitor=True, project_dir=folder)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 1))
    rows = Rows(accelerator.process_index)
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=1e-3), DataLoader(rows, batch_size=1)
    )
    for inputs in loader:
        loss = model(inputs).mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.gather(loss.detach())  # in which rank 0 waits, too
    accelerator.end_training()


@pytest.mark.timing  # on a busy machine other ranks are slow too, at other steps
def test_a_rank_with_slow_data_is_named_in_a_real_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("accel")
    run_world(train, 2, str(tmp_path))
    lines = [json.loads(line) for line in (tmp_path / "monitor" / "rank-00000.jsonl").read_text().splitlines()]
    found = [line for line in lines if line["kind"] == "straggler" and (line["rank"], line["part"]) == (1, "data")]
    assert found and found[0]["seconds"] > 0.015 and found[0]["last"] < 100
    assert "rank 1" in capfd.readouterr().err
    (run,) = read_runs(tmp_path)
    ledger = make_ledger(run)
    # Rank 0 waits for 25 ms in nearly each of the last 100 steps; rank 1, which is the cause, does not.
    assert 1.0 < ledger.seconds[Cause.STRAGGLER] < 5.0 and ledger.total == pytest.approx(
        sum(entry.end - entry.begin for of_rank in ledger.entries.values() for entry in of_rank), rel=0.01
    )
    # The report and the page say it, too.
    assert any("slow: rank 1 (data)" in line for line in report(ledger)) and Cause.STRAGGLER.value in page(ledger)
    assert Cause.STRAGGLER not in {cause for entry in ledger.entries[0, 1] for cause in entry.seconds}

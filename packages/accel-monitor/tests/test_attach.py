"""attach() in one process: what is measured, and that nothing else changes."""

from __future__ import annotations

import copy
import ctypes
import math
import os
import pickle
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_monitor import Part, attach, make_ledger, read_runs
from accel_monitor._torch_compat import PASSES_HIGHER_ORDER
from accel_monitor.ledger import Cause
from accel_monitor.live import read_live
from accel_monitor.monitor import Monitor
from accel_monitor.values import number as number_of
from accel_state import ConfigurationError, rank_ends


class SlowData(torch.utils.data.Dataset):
    """32 samples, each of which takes 5 ms."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.005)
        return torch.full((4,), float(index))


class Net(nn.Module):
    """A linear layer whose forward and backward passes take 10 ms more each, and that has a token count."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        time.sleep(0.01)
        output = self.layer(inputs)
        if output.requires_grad:
            output.register_hook(lambda gradient: time.sleep(0.01))
        return output


def parts(data: torch.utils.data.Dataset) -> tuple[nn.Module, torch.optim.Optimizer, DataLoader]:
    torch.manual_seed(1)
    model = Net()
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), DataLoader(data, batch_size=8)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader) -> None:
    model.train()
    for inputs in loader:
        model(inputs).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def evaluate(model: nn.Module, loader: DataLoader) -> None:
    model.eval()
    with torch.no_grad():
        for inputs in loader:
            model(inputs)


def test_time_goes_to_the_parts_that_took_it_and_training_is_unchanged(tmp_path: Path) -> None:
    plain = parts(SlowData())
    train(*plain)
    model, optimizer, loader = parts(SlowData())
    began = time.perf_counter()
    monitor = attach(loader=loader, optimizer=optimizer, model=model, project_dir=tmp_path)
    train(model, optimizer, loader)
    evaluate(model, loader)
    train(model, optimizer, loader)
    with monitor.part("saving"):
        time.sleep(0.03)
    snapshot = monitor.snapshot()
    took = time.perf_counter() - began
    monitor.finish()
    seconds = snapshot.seconds
    assert sum(seconds) == pytest.approx(snapshot.elapsed)
    assert 0.63 <= snapshot.elapsed <= took  # the sleeps below, and nothing from before or after
    # 64 training samples of 5 ms in 8 steps; 4 evaluation batches of 10 ms and 32 samples of 5 ms. At least: a busy
    # machine sleeps longer.
    assert seconds[Part.DATA] >= 0.32 and seconds[Part.FORWARD] >= 0.08 and seconds[Part.BACKWARD] >= 0.08
    assert seconds[Part.EVALUATION] >= 0.2 and seconds[Part.SAVING] >= 0.03
    assert seconds[Part.WAITING] == seconds[Part.COMPILING] == 0
    assert (snapshot.step, snapshot.samples) == (8, 64)
    train(*plain)
    torch.testing.assert_close(model.layer.weight, plain[0].layer.weight, rtol=0, atol=0)


def test_the_last_line_has_all_counters_and_objects_are_as_before(tmp_path: Path) -> None:
    model, optimizer, loader = parts(TensorDataset(torch.ones(32, 4)))
    cls = type(loader)
    loader.collate_fn = lambda rows: {"input_ids": torch.stack([row[0] for row in rows])}
    monitor = attach(loader=loader, optimizer=optimizer, project_dir=tmp_path, step=7)
    assert isinstance(loader, cls) and type(loader) is not cls and len(loader) == 4
    for batch in loader:
        model(batch["input_ids"]).mean().backward()
        optimizer.step()
    monitor.finish()
    assert type(loader) is cls and not optimizer._optimizer_step_pre_hooks
    (run,) = read_runs(tmp_path)
    (attempt,) = run.attempts[0, 0]
    last = attempt.samples[-1]
    assert (last.step, last.samples, last.tokens, attempt.finished) == (11, 32, 128, True)
    assert sum(last.parts) == pytest.approx(last.at, abs=1e-4)
    assert attempt.start["pid"] == os.getpid() and attempt.begin <= attempt.start["time"] <= time.time()
    assert not os.path.exists(attempt.start["live"]) and not run.notes


def test_workers_copies_and_pickles_are_not_measured(tmp_path: Path) -> None:
    model, optimizer, loader = parts(TensorDataset(torch.ones(32, 4)))
    monitor = attach(loader=loader, optimizer=optimizer, model=model, project_dir=tmp_path)
    for duplicate in (copy.deepcopy(loader), pickle.loads(pickle.dumps(loader))):
        assert type(duplicate) is DataLoader and len(list(duplicate)) == 4
    copied = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    copied(torch.ones(1, 4))
    assert type(loader) is not DataLoader
    snapshot = monitor.snapshot()
    monitor.finish()
    assert snapshot.samples == 0 and snapshot.seconds[Part.FORWARD] == 0


def test_a_loop_that_is_left_closes_the_loader(tmp_path: Path) -> None:
    class Batches:
        closed = False

        def __iter__(self):
            try:
                yield torch.ones(2, 4)
                yield torch.ones(2, 4)
            finally:
                self.closed = True

    loader = Batches()
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = attach(loader=loader, optimizer=optimizer, project_dir=tmp_path)
    for _ in loader:
        break
    assert loader.closed
    monitor.finish()


def test_the_record_in_memory_has_the_step_before_any_report(tmp_path: Path) -> None:
    model, optimizer, loader = parts(torch.ones(32, 4))
    monitor = attach(loader=loader, optimizer=optimizer, model=model, project_dir=tmp_path, interval=1000)
    train(model, optimizer, loader)
    while not list(tmp_path.glob("monitor/*.now")):
        time.sleep(0.01)
    (attempt,) = read_runs(tmp_path)[0].attempts[0, 0]
    assert attempt.last_step == 4 and attempt.finished is None and attempt.running
    record = read_live(attempt.start["live"])
    assert record["step"] == 4 and sum(record["parts"]) == pytest.approx(record["at"])
    monitor.finish()


class Stream(torch.utils.data.IterableDataset):
    """Eight samples without an index."""

    def __iter__(self):
        return iter(torch.ones(8, 4))


def test_iterable_data_and_samplers_without_a_length(tmp_path: Path) -> None:
    model, optimizer, _ = parts(SlowData())
    loader = DataLoader(Stream(), batch_size=2)
    monitor = attach(loader=loader, optimizer=optimizer, model=model, project_dir=tmp_path)
    train(model, optimizer, loader)
    assert [record.indices for record in monitor._recorder.latest()] == [None] * 4
    monitor.finish()
    assert type(loader) is DataLoader and type(loader.batch_sampler) is torch.utils.data.BatchSampler


def test_a_forked_process_leaves_the_record_alone(tmp_path: Path) -> None:
    model, optimizer, loader = parts(torch.ones(32, 4))
    monitor = attach(loader=loader, optimizer=optimizer, model=model, project_dir=tmp_path, interval=1000)
    train(model, optimizer, loader)
    path = monitor._reporter._start["live"]
    monitor._recorder.add_up()  # as the thread does, within a quarter of a second
    before = read_live(path)
    child = os.fork()
    if child == 0:
        code = 1  # an error must not go on with the tests in a second process
        try:
            train(model, optimizer, loader)
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0 and read_live(path)["samples"] == before["samples"] == 32
    assert read_live(path)["step"] == 4
    monitor.finish()


def test_a_loss_is_that_of_the_backward_pass(tmp_path: Path) -> None:
    """Whatever the loop does to it afterwards, also in later steps only: torch does not count all of these changes."""
    model, optimizer, loader = parts(SlowData())
    monitor = attach(loader=loader, optimizer=optimizer, model=model, project_dir=tmp_path, interval=1000)
    backward, weight = monitor.timed_backward(torch.Tensor.backward), torch.ones((), requires_grad=True)
    for step in range(6):
        loss = weight * step
        backward(loss)
        if step == 2:
            time.sleep(0.3)  # the monitor's thread runs
        if step == 3:
            loss.data.mul_(10)
        if step == 4:
            ctypes.c_float.from_address(loss.data_ptr()).value = 50  # as an all-reduce
        if step == 5:
            loss.detach().mul_(10)
        monitor._recorder.step_done()
    assert [record.loss for record in monitor._recorder.latest()] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    monitor.finish()


def _without_odd(rows: list[tuple[torch.Tensor]]) -> list[torch.Tensor]:
    return [torch.stack([row for (row,) in rows if row.sum() % 2 == 0])]


@pytest.mark.parametrize("collate", [None, _without_odd])
def test_samples_are_those_of_each_batch(tmp_path: Path, collate: Any) -> None:
    """A function may leave out some of those that were drawn. A step may have several batches."""
    rows = torch.zeros(10, 4)
    rows[[5, 9], 0] = 1.0  # odd
    model, optimizer, _ = parts(SlowData())
    loader = DataLoader(TensorDataset(rows), batch_size=4, collate_fn=collate)
    monitor = attach(loader=loader, optimizer=optimizer, model=model, project_dir=tmp_path, interval=1000)
    for number, (inputs,) in enumerate(loader):
        model(inputs).pow(2).mean().backward()
        if number:
            optimizer.step()
    assert monitor.snapshot().samples == (10 if collate is None else 8)
    first, second = monitor._recorder.latest()
    assert (first.indices, second.indices) == ([[0, 1, 2, 3], [4, 5, 6, 7]], [[8, 9]])
    monitor.finish()


def test_a_step_of_several_batches_or_passes_keeps_the_time_of_each(tmp_path: Path) -> None:
    """Data of 40 ms per batch, and passes of 10 ms; the backward pass is reported, as by an Accelerator."""
    model, optimizer, loader = parts(SlowData())
    monitor = Monitor(tmp_path, rank=0, world_size=1, interval=1000)
    monitor.watch(loader=loader, model=model, optimizer=optimizer, marks_backward=False)
    backward = monitor.timed_backward(torch.Tensor.backward)
    batches, steps = iter(loader), [(2, 1), (1, 2), (1, 2)]
    for of_step, passes in steps:
        for _ in range(of_step):
            inputs = next(batches)
            for _ in range(passes):
                backward(model(inputs).pow(2).mean())
        optimizer.step()
    backward(weights := model(inputs), gradient=torch.ones_like(weights))
    optimizer.step()
    records = monitor._recorder.latest()
    for record, (of_step, passes) in zip(records, steps, strict=False):
        assert record.seconds[Part.DATA] >= 0.039 * of_step
        assert record.seconds[Part.BACKWARD] >= 0.0099 * of_step * passes
    # The second forward pass of a batch is told apart from then on.
    assert records[0].seconds[Part.FORWARD] >= 0.0198 and records[1].seconds[Part.FORWARD] >= 0.0099
    assert records[2].seconds[Part.FORWARD] >= 0.0198
    assert records[-1].loss is None  # it has many elements
    monitor.finish()


def test_a_loader_whose_data_come_from_another(tmp_path: Path) -> None:
    model, optimizer, _ = parts(SlowData())
    monitor = attach(
        loader=DataLoader(torch.ones(8, 4)), optimizer=optimizer, model=model, project_dir=tmp_path, interval=1000
    )
    inner = DataLoader(torch.ones(8, 4), batch_size=2)
    outer = DataLoader(_Batches(inner), batch_size=None)
    for loader in (inner, outer):
        monitor.watch(loader=loader)
    train(model, optimizer, outer)
    # Those of the inner loader count too: the monitor does not know that they are the same.
    assert monitor.snapshot().samples == 16 and monitor.snapshot().step == 4
    assert [record.indices for record in monitor._recorder.latest()] == [[[2 * n, 2 * n + 1]] for n in range(4)]
    monitor.finish()


class _Batches(torch.utils.data.IterableDataset):
    """The batches of a loader."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __iter__(self) -> Any:
        return iter(self.loader)


def test_losses_of_no_known_batch(tmp_path: Path) -> None:
    model, optimizer, loader = parts(SlowData())
    monitor = attach(loader=loader, optimizer=optimizer, model=model, project_dir=tmp_path, interval=1000)
    backward, weight = monitor.timed_backward(torch.Tensor.backward), torch.ones(1, 1, requires_grad=True)
    backward(weight * 2)
    monitor._recorder.step_done()
    backward(weight * math.nan)
    monitor._recorder.step_done()
    first, second = (number_of(record.loss) for record in monitor._recorder.latest())
    assert first == 2.0 and second is not None and math.isnan(second)
    sleep = monitor.timed_backward(lambda loss: time.sleep(0.01))
    for _ in range(2):  # without a forward pass that is known
        sleep(weight)
    monitor._recorder.step_done()
    assert monitor._recorder.latest()[-1].seconds[Part.BACKWARD] >= 0.0198
    monitor.finish()


@pytest.mark.parametrize("groups", [1, 2])
def test_a_norm_that_is_read_later_belongs_to_the_only_group(tmp_path: Path, groups: int) -> None:
    """As that of a device, whose gradients are gone when it is read; a tensor without values stands for it."""
    model, optimizer, loader = parts(SlowData())
    if groups == 2:
        optimizer.add_param_group({"params": nn.Linear(1, 1).parameters()})
    monitor = attach(loader=loader, optimizer=optimizer, model=model, project_dir=tmp_path, interval=1000)
    monitor.finish()  # so that no thread reads the norm
    monitor.timed_clipping(lambda: torch.empty((), device="meta"))()
    monitor._recorder.step_done()
    (record,) = monitor._recorder.latest()
    assert record.group == (0 if groups == 1 else None)


@pytest.mark.skipif(not PASSES_HIGHER_ORDER, reason="this torch is too old to count, which the report says")
def test_a_loop_that_is_left_within_a_step_does_not_count_its_operations_further(tmp_path: Path) -> None:
    model, optimizer, loader = parts(torch.ones(64, 4))
    monitor = attach(loader=loader, optimizer=optimizer, model=model, project_dir=tmp_path, interval=1000)
    for number, inputs in enumerate(loader):
        model(inputs).pow(2).mean().backward()
        if number == 2:
            break  # in the third step, whose operations are counted
        optimizer.step()
    recorder = monitor._recorder
    assert recorder.flops is not None and recorder.flops._mode is None
    train(model, optimizer, loader)
    assert recorder.flops is None  # a whole step was counted afterwards
    monitor.finish()


def test_files_that_cannot_be_written_cost_a_warning_and_no_counters(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer, loader = parts(torch.ones(32, 4))
    monitor = attach(loader=loader, optimizer=optimizer, model=model, project_dir=tmp_path, interval=0.02)
    folder = tmp_path / "monitor"
    while not list(folder.glob("*.now")):
        time.sleep(0.01)
    folder.rename(tmp_path / "moved")
    folder.write_text("in the way")
    with monitor.part("saving"):
        pass
    train(model, optimizer, loader)
    deadline = time.monotonic() + 60
    while "cannot write" not in caplog.text and time.monotonic() < deadline:
        time.sleep(0.01)
    assert "cannot write" in caplog.text
    folder.unlink()
    (tmp_path / "moved").rename(folder)
    monitor.finish()
    (attempt,) = read_runs(tmp_path)[0].attempts[0, 0]
    assert attempt.samples[-1].step == 4 and len(attempt.saves) == 1 and attempt.finished


def test_compilation_is_a_part(tmp_path: Path) -> None:
    model, optimizer, loader = parts(torch.ones(16, 4))
    compiled = torch.compile(model.layer, backend="eager")
    monitor = attach(loader=loader, optimizer=optimizer, model=compiled, project_dir=tmp_path)
    train(compiled, optimizer, loader)
    seconds = monitor.snapshot().seconds
    monitor.finish()
    assert seconds[Part.COMPILING] > 0 and seconds[Part.FORWARD] < seconds[Part.COMPILING]


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        ({"loader": 3}, "int"),
        ({"loader": [1, 2]}, "list"),
        ({"optimizer": "sgd"}, "sgd"),
        ({"model": "net"}, "net"),
        ({"interval": 0}, "0"),
        ({"step": -1}, "-1"),
        ({"project_dir": __file__}, "test_attach.py"),
    ],
)
def test_arguments_that_cannot_be_used(tmp_path: Path, arguments: dict, value: str) -> None:
    model, optimizer, loader = parts(SlowData())
    good = {"loader": loader, "optimizer": optimizer, "model": model, "project_dir": tmp_path}
    with pytest.raises(ConfigurationError, match=value):
        attach(**{**good, **arguments})
    assert type(loader) is DataLoader and not model._forward_hooks and not optimizer._optimizer_step_pre_hooks
    assert not [thread for thread in threading.enumerate() if thread.name == "accel-monitor"]


def test_a_part_with_another_name(tmp_path: Path) -> None:
    _, optimizer, loader = parts(SlowData())
    monitor = attach(loader=loader, optimizer=optimizer, project_dir=tmp_path)
    with pytest.raises(ConfigurationError, match="lunch"), monitor.part("lunch"):
        pass
    monitor.finish()
    shutil.rmtree(tmp_path)


def test_the_launcher_that_a_variable_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicas, and ranks of mpirun and srun: its start and its exit, which it reports, belong to the run."""
    launcher = rank_ends.Launch("its name", time.time() - 1000, str(tmp_path / "notes"))
    (tmp_path / "notes").mkdir()
    monkeypatch.setenv(rank_ends.VARIABLE, launcher.encode())
    rank_ends.launch.cache_clear()
    try:
        model, optimizer, loader = parts(SlowData())
        monitor = attach(loader=loader, optimizer=optimizer, model=model, project_dir=tmp_path)
        monitor.finish()
    finally:
        rank_ends.launch.cache_clear()
    note = rank_ends.read_note(tmp_path / "notes" / "rank-00000")
    assert note is not None
    note.append_end("launcher", time.time() + 10)
    (run,) = read_runs(tmp_path)
    (attempt,) = run.attempts[0, 0]
    assert attempt.launch == "its name" and attempt.begin == pytest.approx(launcher.began, abs=1e-3)
    ledger = make_ledger(run)
    assert ledger.seconds[Cause.LAUNCHER] > 5 and ledger.total == pytest.approx(ledger.wall)

"""Told to end, a run saves at a step that all ranks agree on, and the same command continues it bit by bit."""

from __future__ import annotations

import functools
import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from forks import run_launched
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed import HashStore
from torch.utils.data import DataLoader, Dataset, TensorDataset

from accel import Accelerator, Preempted, ProjectConfiguration, SaveOnSignal
from accel.preemption import stop_consensus
from accel.preemption.handler import resolve
from accel.preemption.stop_consensus import StopAgreement
from accel_data import loop_hooks
from accel_state import AcceleratorState, ConfigurationError, PartialState
from accel_state.preemption import Note, read_note, remove_note, write_note
from accel_state.random import set_seed


@pytest.fixture(autouse=True)
def no_handlers_left() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)}
    yield
    watch = loop_hooks.current()
    if watch is not None:
        watch.remove()  # type: ignore[attr-defined]
    assert {number: signal.getsignal(number) for number in before} == before


class Noisy(Dataset):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((3,), float(index)) / 24 + torch.rand(3)


def parts(folder: Path, workers: int = 0, **options: Any) -> tuple[Any, ...]:
    AcceleratorState._reset_state()
    set_seed(1)
    accelerator = Accelerator(cpu=True, project_dir=folder, **{"save_on_signal": True, **options})
    model = nn.Sequential(nn.Linear(3, 5), nn.Dropout(0.3), nn.Linear(5, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    training = DataLoader(Noisy(), batch_size=4, shuffle=True, num_workers=workers)
    evaluation = DataLoader(TensorDataset(torch.randn(9, 3)), batch_size=2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    accelerator.register_for_checkpointing(scheduler, plateau)
    return accelerator, *accelerator.prepare(model, optimizer, training, evaluation), scheduler, plateau


def run(
    objects: tuple[Any, ...], kill_at: int = -1, number: int = signal.SIGUSR1, stepped: list[str] | None = None
) -> list[torch.Tensor]:
    """Two epochs with an evaluation each; the process gets a signal in step ``kill_at``, counted over both loops."""
    accelerator, model, optimizer, training, evaluation, scheduler, plateau = objects
    steps = 0
    for _ in range(training.iteration, 2):
        model.train()
        for x in training:
            steps += 1
            if steps == kill_at:
                os.kill(os.getpid(), number)
            accelerator.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            if stepped is not None:
                stepped.append("training")
        scheduler.step()
        torch.rand(3)
        model.eval()
        total = 0.0
        with torch.no_grad():
            for (x,) in evaluation:
                steps += 1
                if steps == kill_at:
                    os.kill(os.getpid(), number)
                total += float(model(x).sum() + torch.rand(()))
                if stepped is not None:
                    stepped.append("evaluation")
        plateau.step(total)
    rates = [torch.tensor(group["lr"]) for group in optimizer.param_groups]
    weights = [*(p.detach().clone() for p in model.parameters()), *rates]
    accelerator.end_training()
    return weights


@functools.cache
def undisturbed(workers: int = 0) -> list[torch.Tensor]:
    return run(parts(Path("nowhere"), workers))


@pytest.mark.parametrize("kill_at", [1, 3, 6, 7, 9, 11, 12, 18, 22])
def test_one_process_continues_bitwise(tmp_path: Path, kill_at: int, capsys: pytest.CaptureFixture[str]) -> None:
    expected = undisturbed()
    stepped: list[str] = []
    with pytest.raises(Preempted) as ended:
        run(parts(tmp_path), kill_at, stepped=stepped)
    # The step in which the signal came was finished, and none was begun after it.
    assert len(stepped) == kill_at
    assert ended.value.code == 75 and ended.value.checkpoint == tmp_path / "preempted"
    assert "SIGUSR1: the training was saved to" in capsys.readouterr().err
    objects = parts(tmp_path)
    assert objects[0].resume()
    stepped = []
    resumed = run(objects, stepped=stepped)
    assert all(torch.equal(*pair) for pair in zip(resumed, expected, strict=True))
    # An evaluation that was interrupted is run again from its start.
    assert stepped.count("evaluation") == (5 if kill_at > 11 else 10)


@pytest.mark.slow  # a fresh interpreter with loader workers; test_one_process_continues_bitwise is fast
@pytest.mark.timeout(300)  # a fresh interpreter, which a busy machine keeps waiting
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_workers_outlive_a_signal_to_the_whole_group(tmp_path: Path) -> None:
    """SLURM signals every process of a step."""
    expected = undisturbed(2)
    script = f"""
        import os, signal, sys
        sys.path[:0] = {[str(Path(__file__).parent), *sys.path]}
        import test_preemption as t
        from pathlib import Path
        os.kill = lambda pid, number: os.killpg(0, number)
        t.run(t.parts(Path({str(tmp_path)!r}), workers=2), 3, signal.SIGTERM)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        timeout=280,
        start_new_session=True,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 75, done.stderr
    objects = parts(tmp_path, workers=2)
    assert objects[0].resume()
    assert all(torch.equal(*pair) for pair in zip(run(objects), expected, strict=True))


@pytest.mark.parametrize("ending", ["", "next(iter(loader))"])
def test_workers_of_a_loader_of_the_module_end_with_it(tmp_path: Path, ending: str) -> None:
    """They ignore SIGTERM, with which multiprocessing ends them when Python exits, and then waits for them."""
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(f"""
            from torch.utils.data import DataLoader
            from accel import Accelerator

            accelerator = Accelerator(cpu=True, project_dir={str(tmp_path)!r}, save_on_signal=True)
            loader = accelerator.prepare(DataLoader(range(4), num_workers=1, persistent_workers=True))
            print([int(x) for x in loader], flush=True)
            {ending}
        """)
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout) == (0, "[0, 1, 2, 3]\n"), done.stderr


def test_a_step_that_draws_from_two_loaders_is_whole(tmp_path: Path) -> None:
    def pairs(folder: Path, kill_at: int) -> Iterator[tuple[int, int]]:
        AcceleratorState._reset_state()
        accelerator = Accelerator(cpu=True, project_dir=folder, save_on_signal="SIGUSR1")
        loaders = accelerator.prepare(DataLoader(range(8), batch_size=1), DataLoader(range(8), batch_size=1))
        accelerator.resume()
        for step, (a, b) in enumerate(zip(*loaders, strict=True)):
            yield int(a), int(b)
            if step == kill_at:
                os.kill(os.getpid(), signal.SIGUSR1)
        accelerator.end_training()

    seen: list[tuple[int, int]] = []
    with pytest.raises(Preempted):
        seen.extend(pairs(tmp_path, 3))
    seen = [(n, n) for n in range(4)]
    gc.collect()
    assert [*seen, *pairs(tmp_path, -1)] == [(n, n) for n in range(8)]


def test_automatic_naming_takes_the_next_number(tmp_path: Path) -> None:
    config = ProjectConfiguration(project_dir=str(tmp_path), automatic_checkpoint_naming=True)
    objects = parts(tmp_path, project_config=config)
    assert not objects[0].resume()
    with pytest.raises(Preempted) as ended:
        run(objects, 2)
    assert ended.value.checkpoint == tmp_path / "checkpoints" / "checkpoint_0"
    config = ProjectConfiguration(project_dir=str(tmp_path), automatic_checkpoint_naming=True)
    objects = parts(tmp_path, project_config=config)
    assert objects[0].resume() and objects[0].project_configuration.iteration == 1
    objects[0].end_training()


def test_an_own_folder_and_exit_code(tmp_path: Path) -> None:
    settings = SaveOnSignal(["usr2", signal.SIGUSR1], output_dir=tmp_path / "own", exit_code=99)
    objects = parts(tmp_path, save_on_signal=settings)
    assert not objects[0].resume()
    with pytest.raises(Preempted) as ended:
        run(objects, 2, signal.SIGUSR2)
    assert ended.value.code == 99 and ended.value.checkpoint == tmp_path / "own"
    objects = parts(tmp_path, save_on_signal=settings)
    assert objects[0].resume()
    objects[0].end_training()


def test_a_former_handler_is_called_and_put_back(tmp_path: Path) -> None:
    heard: list[int] = []
    former = signal.signal(signal.SIGUSR1, lambda number, frame: heard.append(number))
    own = signal.getsignal(signal.SIGUSR1)
    try:
        with pytest.raises(Preempted):
            run(parts(tmp_path), 1)
        assert heard == [signal.SIGUSR1]
        parts(tmp_path)[0].end_training()
        assert signal.getsignal(signal.SIGUSR1) is own
        accelerator = parts(tmp_path)[0]
        later = lambda number, frame: None  # noqa: E731
        signal.signal(signal.SIGUSR1, later)
        accelerator.end_training()
        assert signal.getsignal(signal.SIGUSR1) is later
    finally:
        signal.signal(signal.SIGUSR1, former)


def test_the_newest_accelerator_has_the_signals(tmp_path: Path) -> None:
    first = parts(tmp_path)[0]
    second = parts(tmp_path)[0]
    assert loop_hooks.current() is second.preemption is not first.preemption
    first.end_training()
    assert loop_hooks.current() is second.preemption
    second.end_training()
    assert loop_hooks.current() is None


@pytest.fixture
def collected_here() -> Iterator[None]:
    """No other thread of the process, as pytest-xdist has one, collects what the test drops."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("collected_here")
def test_without_its_accelerator_nobody_listens(tmp_path: Path) -> None:
    objects = parts(tmp_path)
    assert loop_hooks.current() is not None
    del objects
    gc.collect()
    assert loop_hooks.current() is None


@pytest.mark.usefixtures("collected_here")
def test_a_signal_is_not_lost_when_its_accelerator_was_dropped_in_a_thread(tmp_path: Path) -> None:
    """Garbage is collected in any thread, and handlers are touched in the main one only."""
    heard: list[int] = []
    former = signal.signal(signal.SIGUSR1, lambda number, frame: heard.append(number))
    own = signal.getsignal(signal.SIGUSR1)
    try:
        objects = [parts(tmp_path)]
        thread = threading.Thread(target=lambda: (objects.clear(), gc.collect()))
        thread.start()
        thread.join()
        assert loop_hooks.current() is not None, "it was collected elsewhere: this test shows nothing"
        os.kill(os.getpid(), signal.SIGUSR1)
        assert heard == [signal.SIGUSR1] and loop_hooks.current() is None and signal.getsignal(signal.SIGUSR1) is own
    finally:
        signal.signal(signal.SIGUSR1, former)


def test_without_it_no_signal_is_touched(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    objects = parts(tmp_path, save_on_signal=None)
    assert signal.getsignal(signal.SIGTERM) is before and objects[0].preemption is None
    objects[0].end_training()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("SIGNONE", "is not a signal of this system. Allowed: .*SIGTERM"),
        ([], "has no signals"),
        (9, "SIGKILL cannot be used"),
        (3.5, "is not allowed"),
        (b"SIGTERM", "is not allowed"),
        (12345, "is not a signal"),
    ],
)
def test_values_that_mean_nothing(value: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        resolve(value)


@pytest.mark.parametrize(
    "options", [{"exit_code": 0}, {"exit_code": 143}, {"grace_seconds": 0}, {"meeting_seconds": -1.0}]
)
def test_settings_that_are_not_allowed(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(options))):
        SaveOnSignal(**options)


def test_it_must_be_clear_where_to_save(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="save_on_signal needs a directory"):
        Accelerator(cpu=True, save_on_signal=True)
    AcceleratorState._reset_state()
    config = ProjectConfiguration(project_dir=str(tmp_path), automatic_checkpoint_naming=True)
    with pytest.raises(ConfigurationError, match="contradicts automatic_checkpoint_naming"):
        Accelerator(cpu=True, project_config=config, save_on_signal=SaveOnSignal(output_dir=tmp_path))
    AcceleratorState._reset_state()
    with pytest.raises(ConfigurationError, match="resume needs a directory"):
        Accelerator(cpu=True).resume()


def test_only_the_main_thread_handles_signals(tmp_path: Path) -> None:
    errors: list[BaseException] = []

    def build() -> None:
        try:
            parts(tmp_path)
        except ConfigurationError as error:
            errors.append(error)

    thread = threading.Thread(target=build)
    thread.start()
    thread.join()
    assert "main thread only" in str(errors[0])


def test_notes_for_the_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    accelerator = parts(tmp_path)[0]
    note = read_note(tmp_path)
    assert note == Note(os.getpid(), [signal.SIGTERM, signal.SIGUSR1], 300.0)
    worker = os.fork()
    if worker == 0:
        try:
            accelerator.end_training()
        finally:
            os._exit(0)
    os.waitpid(worker, 0)
    assert read_note(tmp_path) == note, "a forked worker takes back no note but its own"
    accelerator.end_training()
    assert read_note(tmp_path) is None
    with pytest.raises(Preempted) as ended:
        run(parts(tmp_path), 2)
    assert read_note(tmp_path).saved == str(ended.value.checkpoint)
    (tmp_path / "save_on_signal.json").write_text("{")
    assert read_note(tmp_path) is None
    write_note(tmp_path, Note(1, [2], 3.0))
    remove_note(tmp_path)
    remove_note(tmp_path)


# A program is a list of loops, each with so many steps; a schedule says which rank runs next; a rank is told to stop
# before some turn.
programs = st.lists(st.integers(0, 9), min_size=1, max_size=6)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])  # that one is about seconds
@given(
    loops=programs,
    world=st.integers(2, 4),
    turns=st.lists(st.integers(0, 3), max_size=60),
    told=st.integers(0, 40),
    who=st.integers(0, 3),
)
def test_ranks_agree_however_they_are_interleaved(
    loops: list[int], world: int, turns: list[int], told: int, who: int
) -> None:
    store = HashStore()
    points = [(loop, step) for loop, steps in enumerate(loops) for step in range(steps + 1)]
    agreements = [StopAgreement(store, rank, world) for rank in range(world)]
    at, stopped, was_told = [0] * world, [False] * world, False
    schedule = [turn % world for turn in turns] + list(range(world)) * len(points)
    for turn, rank in enumerate(schedule):
        if stopped[rank] or at[rank] == len(points):
            continue
        loop, step = points[at[rank]]
        wants = turn >= told and rank == who % world
        was_told |= wants
        stopped[rank] = agreements[rank].passes(loop, begins=step == 0, wants_to_stop=wants)
        at[rank] += not stopped[rank]
        assert was_told or not stopped[rank], "a rank stops although none was told to"
        if wants and not stopped[rank] and at[rank] < len(points):
            assert_announced(store, agreements, rank)
    assert len(set(stopped)) == 1 and len(set(at)) == 1
    assert was_told or at[0] == len(points)


def assert_announced(store: HashStore, agreements: list[StopAgreement], rank: int) -> None:
    """The other ranks stop at this rank's next open point, unless one of them has passed it already."""
    lease = agreements[rank]._lease
    passed = any(other._lease > lease for other in agreements)
    announced = store.check([f"point/{lease}"]) and store.get(f"point/{lease}") == b"stop"
    assert announced or passed or agreements[rank]._announced < lease


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_rank_that_is_told_stops_all_at_the_next_open_point(ahead: int) -> None:
    """Between two open points, so that only the announcement tells the rank that gets there first."""
    store = HashStore()
    told, other = StopAgreement(store, 0, 2), StopAgreement(store, 1, 2)
    for agreement in (told, other):
        assert not agreement.passes(0, begins=True, wants_to_stop=False)
        agreement._steps_left = 5  # as after fast steps
    for _ in range(3):
        assert not told.passes(0, begins=False, wants_to_stop=False)
    for _ in range(3 - ahead):
        assert not other.passes(0, begins=False, wants_to_stop=False)
    assert not told.passes(0, begins=False, wants_to_stop=True), "this point is not open"
    for _ in range(1 + ahead):
        assert not other.passes(0, begins=False, wants_to_stop=False)
    assert other.passes(0, begins=False, wants_to_stop=False) and told.passes(0, begins=False, wants_to_stop=False)


def test_a_rank_that_always_comes_last_stops_all_at_the_second_point() -> None:
    """With long steps each point is open, and the others decide first to continue at each."""
    store = HashStore()
    told, other = StopAgreement(store, 0, 2), StopAgreement(store, 1, 2)
    seen = []
    for step in range(2):
        told._since = other._since = -1e6  # so that the last step took long
        seen.append([one.passes(0, begins=step == 0, wants_to_stop=one is told) for one in (other, told)])
    assert seen == [[False, False], [True, True]]


def test_fast_steps_read_the_store_seldom() -> None:
    """First at each step, then after twice as many each time, up to 64."""

    class Counting:
        def __init__(self) -> None:
            self.store, self.count = HashStore(), 0

        def compare_set(self, *arguments: str) -> bytes:
            self.count += 1
            return self.store.compare_set(*arguments)

    store = Counting()
    agreement = StopAgreement(store, 1, 2)
    for step in range(1 + 1 + 2 + 4 + 8 + 16 + 32 + 64):
        agreement.passes(0, begins=step == 0, wants_to_stop=False)
    assert 8 <= store.count < 40  # 8, unless this process stands still meanwhile


def test_ranks_that_do_not_come_are_named() -> None:
    store = HashStore()
    first, second = StopAgreement(store, 0, 3), StopAgreement(store, 2, 3)
    assert first.meet(0.1) == [1, 2]
    assert second.meet(0.1) == [1]


def test_a_rank_that_stood_still_looks_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HashStore()
    for rank in (1, 2):
        StopAgreement(store, rank, 3).meet(0.01)
    last, clock = StopAgreement(store, 0, 3), iter([0.0, 1000.0])
    monkeypatch.setattr(stop_consensus, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    assert last.meet(60.0) == []


class Gone:
    """The store of a process that has ended."""

    def compare_set(self, *_: object) -> bytes:
        raise RuntimeError("connection reset")

    set = check = compare_set


def test_a_store_that_is_gone_ends_no_training(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PartialState(cpu=True), "process_index", 1)  # each rank says so
    agreement = StopAgreement(Gone(), 1, 2)
    assert not any(agreement.passes(1, begins=step == 0, wants_to_stop=False) for step in range(200))
    assert caplog.text.count("[RANK 1] The store of the process group is lost") == 1
    assert agreement.passes(2, begins=True, wants_to_stop=True) and agreement.meet(0.1) == [0]
    while_stopping = StopAgreement(Gone(), 1, 2)
    assert while_stopping.meet(60.0) == [0, 1] and while_stopping.lost
    assert not StopAgreement(Gone(), 1, 2).answers() and StopAgreement(HashStore(), 1, 2).answers()


SCRIPT = """
import pathlib, sys, time
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from accel import Accelerator
from accel.utils import set_seed

folder = pathlib.Path(sys.argv[1])
accelerator = Accelerator(cpu=True, project_dir=folder, save_on_signal=True)
set_seed(0, device_specific=True)
model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters())
samples = torch.randn(240, 3, generator=torch.Generator().manual_seed(0))  # the same on all ranks
training = DataLoader(TensorDataset(samples[:160]), batch_size=4, shuffle=True)
evaluation = DataLoader(TensorDataset(samples[160:]), batch_size=2)
model, optimizer, training, evaluation = accelerator.prepare(model, optimizer, training, evaluation)
accelerator.print("resumed" if accelerator.resume() else "fresh")

def wait_in(loop, step):
    # For the signal, however late it comes; or until nobody is to wait any more. In the first steps ranks still
    # compare batches and calls through the store: torch writes frames of C++ if that ends in the middle of a call.
    if step != 4:
        return
    (folder / f"{loop}{accelerator.process_index}").touch()
    while loop == sys.argv[2] and (folder / "hold").exists() and accelerator.preemption.received is None:
        time.sleep(0.01)

for epoch in range(training.iteration, 2):
    model.train()
    for step, (x,) in enumerate(training):
        accelerator.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        wait_in("training", step)
    model.eval()
    with torch.no_grad():
        for step, (x,) in enumerate(evaluation):
            accelerator.gather_for_metrics(model(x))
            wait_in("evaluation", step)
accelerator.print("weights", sum(float(p.double().sum()) for p in model.parameters()))
accelerator.end_training()
"""


class Job:
    """The script under ``accel launch``, whose ranks wait in a loop for a signal, or for :meth:`go_on`."""

    def __init__(self, folder: Path, ranks: int, *words: str, loop: str) -> None:
        folder.mkdir(exist_ok=True)
        (folder / "hold").touch()
        (folder / "script.py").write_text(SCRIPT)
        environment = {
            key: value for key, value in os.environ.items() if not key.startswith(("ACCELERATE_", "TORCHELASTIC_"))
        }
        launch = [sys.executable, "-m", "accel_launch", "launch", "--cpu", "--num_processes", str(ranks), *words]
        self.folder, self.ranks = folder, ranks
        self.process = subprocess.Popen(
            [*launch, str(folder / "script.py"), str(folder), loop],
            env={**environment, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def wait_for(self, loop: str) -> None:
        """Until every rank is in that loop."""
        while not all((self.folder / f"{loop}{rank}").exists() for rank in range(self.ranks)):
            assert self.process.poll() is None, self.process.communicate()[0]
            time.sleep(0.01)

    def go_on(self) -> None:
        """Have no rank wait any more."""
        (self.folder / "hold").unlink()

    def last_rank(self) -> int:
        """The process of a rank."""
        return psutil.Process(self.process.pid).children()[-1].pid

    def end(self) -> tuple[int, str]:
        output, _ = self.process.communicate(timeout=800)
        return self.process.returncode, output


def weights_of(output: str) -> str:
    return next(line for line in output.splitlines() if line.startswith("weights"))


@pytest.mark.slow  # starts the launcher and two ranks; signals in one process have fast tests
def test_a_launcher_that_is_killed(tmp_path: Path) -> None:
    """The ranks end with one line that says so, without waiting for each other and without torch's C++ frames."""
    job = Job(tmp_path / "job", 2, loop="training")
    job.wait_for("training")
    job.process.kill()
    _, output = job.end()
    lines = [line for line in output.splitlines() if line not in ("fresh", "") and "resume() found" not in line]
    assert len(lines) == 1 and "the launcher is gone" in lines[0] and "without saving" in lines[0], output
    assert not (job.folder / "preempted").exists()


def test_an_exit_in_a_finalizer_is_not_lost() -> None:
    script = """
        from accel.preemption.handler import exit_from_signal

        class Loader:
            def __del__(self):
                exit_from_signal(143)

        Loader()
        print("still running")
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert (result.returncode, result.stdout, result.stderr) == (143, "", "")


@pytest.mark.slow
@pytest.mark.timeout(900)  # three launches one after the other
def test_under_the_launcher(tmp_path: Path) -> None:
    """Told to end in three ways, each run continues where the one before it stopped, and the last one ends like an
    undisturbed one.
    """
    folder, whole = tmp_path / "told", tmp_path / "whole"
    whole.mkdir()
    (whole / "script.py").write_text(SCRIPT)
    undisturbed = run_launched(whole / "script.py", whole, "none", launch=("--cpu", "--num_processes", 2), folder=whole)
    expected = weights_of("\n".join(undisturbed))
    for loop, number in [("training", signal.SIGTERM), ("evaluation", signal.SIGUSR1)]:
        job = Job(folder, 2, loop=loop)
        job.wait_for(loop)
        job.process.send_signal(number)
        code, output = job.end()
        assert code == 75 and "was saved to" in output, output
        for mark in folder.glob("*0"):
            mark.unlink()
    job = Job(folder, 2, "--max_restarts", "1", loop="training")
    job.wait_for("training")
    os.kill(job.last_rank(), signal.SIGUSR1)
    job.go_on()
    code, output = job.end()
    assert code == 0 and "restart 1 of 1" in output, output
    assert output.count("resumed") == 2 and weights_of(output) == expected

"""Saves in the background are written by another process: the same bytes, and what happens when a process ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import types
from collections import deque
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn

from accel_checkpoint import (
    AsyncSaver,
    CheckpointError,
    list_checkpoints,
    load,
    save,
    save_process,
    shared_memory,
    writer,
)
from accel_checkpoint.manifest import MANIFEST_NAME
from accel_checkpoint.parts import Part, copied_parts
from accel_state import PartialState
from accel_state.testing import run_world

# Saves in the background what takes a process to write, and then does what the test asks for.
SCRIPT = """
import os, sys, time, torch
from accel_checkpoint import AsyncSaver, save_process
save_process.MIN_BYTES = 0
saver = AsyncSaver()
saver.save({"weights": torch.arange(1000.0)}, sys.argv[1])
if sys.argv[2] == "hang":
    os.mkfifo(os.path.join(os.path.dirname(sys.argv[1]), ".state.accel-partial", "weights.bin"))
    time.sleep(600)
print("in flight:", saver.in_flight)
"""


@pytest.fixture(scope="module", autouse=True)
def one_process() -> Iterator[None]:
    """The process that writes is kept from test to test: starting one takes seconds."""
    yield
    save_process.saves.stop()


@pytest.fixture(autouse=True)
def processes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Small states are written by a process too."""
    monkeypatch.setattr(save_process, "MIN_BYTES", 0)
    # A class that another test has allowed, and that the process cannot import, would keep it from being asked.
    allowed = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    yield
    torch.serialization.add_safe_globals(allowed)


def pid() -> int:
    """The process for saves of this one, as soon as there is one."""
    return int(until(lambda: save_process.saves._process and save_process.saves._process.pid))


def until(found: Callable[[], Any]) -> Any:
    for _ in range(6000):
        if value := found():
            return value
        time.sleep(0.01)
    raise AssertionError("nothing was found in a minute")


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != MANIFEST_NAME}


def odd_values() -> dict[str, Any]:
    base = torch.arange(12.0)
    return {
        "base": base,
        "view": base[3:7],
        "transposed": base.view(3, 4).t(),
        "parameter": nn.Parameter(torch.rand(3)),
        "frozen": nn.Parameter(torch.rand(3), requires_grad=False),
        "tracked": torch.rand(3, requires_grad=True),
        "twice": [base, base],
        "empty": torch.empty(0, 4),
        "bf16": torch.rand(3).bfloat16(),
        "bool": torch.tensor([True, False]),
        "sparse": torch.eye(3).to_sparse(),
        "scalar": torch.tensor(3),
        "negative": torch._neg_view(torch.rand(3)),
        "conjugate": torch.view_as_complex(torch.rand(2, 2)).conj(),
        "meta": torch.empty(3, device="meta"),
        "plain": {"a": (1, None, "x"), 2: [3, 4], "c": "x"},
    }


def test_the_same_bytes(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(40, 30), nn.Linear(30, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.rand(3, 40)).sum().backward()
    optimizer.step()
    values = odd_values()
    state = {"model": model, "optimizer": optimizer, "values": values}
    save(state, tmp_path / "waited")
    saver = AsyncSaver()
    for _ in range(2):  # the second time into memory that was kept
        saver.save(state, tmp_path / "beside")
        with torch.no_grad():
            values["base"].add_(1)  # training continues
        saver.wait()
        assert save_process.saves._process is not None
        assert contents(tmp_path / "waited") == contents(tmp_path / "beside")
        with torch.no_grad():
            values["base"].sub_(1)
    process, saved = pid(), {"big": torch.arange(5_000_000.0)}
    saver.save(saved, tmp_path / "big")
    saver.wait()
    assert pid() == process and torch.equal(load(tmp_path / "big")["big"], saved["big"])


def test_memory_is_kept_and_what_is_not_needed_is_released(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "_SEGMENT_BYTES", 1 << 16)
    memory, kept = shared_memory.SharedMemory(), []

    def copied(*sizes: int) -> None:
        tensors = [torch.arange(size, dtype=torch.int32) for size in sizes]
        (part,) = copied_parts([Part("a", tensors)], memory)
        assert all(map(torch.equal, part.value, tensors))
        kept.append([(number, segment.begin) for number, segment in memory.segments.items()])

    copied(10_000, 20_000, 5_000, 0)
    copied(10_000, 20_000, 5_000, 0)
    assert kept[0] == kept[1] and [number for number, _ in kept[0]] == [0, 1]
    copied(100)
    assert kept[2] == kept[0][:1] and memory.used_bytes == 448  # a multiple of 64


def test_errors_of_the_process_are_raised_here(tmp_path: Path) -> None:
    saver = AsyncSaver()
    saver.save({"value": 1}, tmp_path / "state")
    saver.save({"value": {"odd": deque([1])}}, tmp_path / "state")
    with pytest.raises(CheckpointError, match=r"value.*collections\.deque") as caught:
        saver.wait()
    assert "in the process that writes the state" in str(caught.value.__cause__)
    os.kill(pid(), signal.SIGSTOP)
    saver.save({"value": 3}, tmp_path / "other")
    (tmp_path / ".other.accel-partial" / "value.bin").mkdir()
    os.kill(pid(), signal.SIGCONT)
    with pytest.raises(CheckpointError, match=r"could not be written to .*other.*value\.bin"):
        saver.wait()
    assert load(tmp_path / "state") == {"value": 1} and os.listdir(tmp_path) == ["state"]


def test_a_process_that_is_killed_and_the_next_one(tmp_path: Path) -> None:
    saver = AsyncSaver()
    saver.save({"value": 1}, tmp_path / "state")
    saver.wait()
    killed = pid()
    os.kill(killed, signal.SIGSTOP)
    saver.save({"value": 2}, tmp_path / "state")
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):  # what a launcher sends to all processes
        os.kill(killed, number)
    time.sleep(0.1)
    os.kill(killed, signal.SIGKILL)
    with pytest.raises(CheckpointError, match=r"ended in the middle \(exit code -9"):
        saver.wait()
    assert load(tmp_path / "state") == {"value": 1} and os.listdir(tmp_path) == ["state"]
    saver.save({"value": 3}, tmp_path / "state")
    starting = until(lambda: pid() != killed and pid())
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        os.kill(starting, number)  # they are for the rank, also while it starts
    saver.wait()
    assert load(tmp_path / "state") == {"value": 3} and pid() == starting


@pytest.mark.slow  # starts two interpreters; a process that is killed is fast
def test_it_ends_with_the_rank_and_in_the_middle_of_a_file(tmp_path: Path) -> None:
    """It waits for the other end of a pipe that is in the place of the file."""
    rank = subprocess.Popen([sys.executable, "-c", SCRIPT, str(tmp_path / "state"), "hang"])
    waiting = until(lambda: psutil.Process(rank.pid).children())[0]
    partial = tmp_path / ".state.accel-partial"
    until(lambda: (partial / "weights.bin").exists())
    rank.kill()
    rank.wait()
    assert waiting.wait(timeout=60) is None or not waiting.is_running()
    save({"value": 2}, tmp_path / "state")  # the lock is free
    assert load(tmp_path / "state") == {"value": 2} and os.listdir(tmp_path) == ["state"]


@pytest.mark.slow  # starts two interpreters; test_checkpoint_background.py waits for an Accelerator's save
def test_the_interpreter_waits_for_it(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "state"), "exit"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=280, check=True)
    assert result.stdout == "in flight: True\n" and not result.stderr
    assert torch.equal(load(tmp_path / "state")["weights"], torch.arange(1000.0))


def test_it_does_not_write_into_the_directory_of_the_next_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # which the process leaves for the directory that it writes into
    status = tmp_path.stat()
    (tmp_path / "new").mkdir()
    with pytest.raises(CheckpointError, match="was replaced"):
        save_process._write_parts(writer.write_parts, str(tmp_path / "new"), (status.st_dev, status.st_ino), [], 1, [])
    assert os.listdir(tmp_path / "new") == []


def test_what_only_this_process_can_read_is_written_by_a_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Own:
        """Pickled by a reference that the other process does not find."""

        __module__, __qualname__ = "only_here", "Own"

    module = types.ModuleType("only_here")
    monkeypatch.setitem(sys.modules, "only_here", module)
    monkeypatch.setattr(module, "Own", Own, raising=False)
    saver = AsyncSaver()
    with torch.serialization.safe_globals([Own]):
        saver.save({"value": Own()}, tmp_path / "state")
        saver.wait()
        assert type(load(tmp_path / "state")["value"]) is Own


def test_classes_that_the_rank_has_declared_as_safe_are_safe_there(tmp_path: Path) -> None:
    saver = AsyncSaver()
    saver.save({"value": Fraction(1, 3)}, tmp_path / "state")
    with pytest.raises(CheckpointError, match="Fraction"):
        saver.wait()
    with torch.serialization.safe_globals([Fraction]):
        saver.save({"value": Fraction(1, 3)}, tmp_path / "state")
        saver.wait()
        assert load(tmp_path / "state") == {"value": Fraction(1, 3)}


def ranks(folder: str) -> list[float]:
    save_process.MIN_BYTES = 0
    rank = PartialState().process_index
    with AsyncSaver() as saver:
        for step in range(3):
            state = {"weights": torch.full((9,), float(step)), "own": torch.full((5,), float(rank))}
            saver.save(state, f"{folder}/checkpoint_{step}", step=step, per_rank=["own"], keep=2)
    assert save_process.saves._process is not None
    loaded = load(f"{folder}/checkpoint_2")
    return [loaded["weights"].sum().item(), loaded["own"].sum().item()]


def test_each_rank_has_a_process(tmp_path: Path) -> None:
    assert run_world(ranks, 2, str(tmp_path)) == [[18.0, 0.0], [18.0, 5.0]]
    assert [info.path.name for info in list_checkpoints(tmp_path)] == ["checkpoint_1", "checkpoint_2"]

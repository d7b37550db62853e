"""Hang reports of real ranks: what every rank is doing, printed once, and again with the launcher's final error."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from forks import Processes, Program

from accel_state.ports import get_free_port

pytestmark = pytest.mark.timeout(300)

HEAD = """
import time
from datetime import timedelta
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset
from accel import Accelerator
from accel.utils import InitProcessGroupKwargs

class Samples(Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        if rank == 0 and index >= 8:
            time.sleep(1000)  # a file server
        return torch.ones(4)

accelerator = Accelerator(cpu=True, kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=LIMIT))])
rank = accelerator.process_index
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = accelerator.prepare(model, optimizer)

def step(inputs):
    accelerator.backward(model(inputs).sum())
    optimizer.step()
    optimizer.zero_grad()

for _ in range(3):
    step(torch.rand(2, 4))
"""

WAYS = {
    # the rest of the script; what rank 0 and rank 1 do, and where
    "save_state": (
        "if rank == 0: accelerator.save_state('state')\nstep(torch.rand(2, 4))",
        r"in save_state \(\w+\) .* <module>; waits for rank 1",
        r"in backward .* step; waits for rank 0",
    ),
    "gather": (
        "if rank == 0: accelerator.gather(torch.ones(3))\naccelerator.wait_for_everyone()",
        r"in gather \(\w+\) .* <module>; waits for rank 1",
        r"in wait_for_everyone \(barrier\) .* <module>; waits for rank 0",
    ),
    "torch": (
        "if rank == 0: dist.broadcast(torch.ones(3), 1)\nelse: dist.barrier()",
        r"in broadcast for .* <module>; waits for rank 1",
        r"in barrier for .* <module>; waits for rank 0",
    ),
    "user_code": (
        "if rank == 0: time.sleep(1000)\naccelerator.wait_for_everyone()",
        r"in user code for \d+ s, at \S+ in <module>$",
        r"in wait_for_everyone \(barrier\) .*; waits for rank 0",
    ),
    "loader": (
        "for batch in accelerator.prepare(DataLoader(Samples(), batch_size=2)): step(batch)",
        r"in user code of a data loader for .* __getitem__$",
        r"in (backward|a data loader) .*; waits for rank 0",
    ),
    "left_early": (
        "if rank == 1: step(torch.rand(2, 4))\naccelerator.wait_for_everyone()",
        r"in wait_for_everyone \(barrier\) .*; waits for rank 1",
        r"in backward .*; waits for rank 0",
    ),
}
TORCHRUN = "import runpy, sys; runpy.run_path(sys.argv[1], run_name='__main__')"


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    with Processes("torch", "torch.distributed", "accel.accelerator") as server:
        yield server


def write(folder: Path, rest: str, limit: int) -> Path:
    script = folder / "script.py"
    script.write_text(HEAD.replace("LIMIT", str(limit)) + rest + "\n")
    return script


def start(processes: Processes, script: Path, seconds: str) -> list[Program]:
    """Start two ranks as torchrun does."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(get_free_port()), "WORLD_SIZE": "2"}
    variables = {**os.environ, **address, "LOCAL_WORLD_SIZE": "2", "ACCELERATE_HANG_REPORT_SECONDS": seconds}
    return [
        processes.start(TORCHRUN, str(script), cwd=script.parent, env={**variables, "RANK": rank, "LOCAL_RANK": rank})
        for rank in "01"
    ]


def check(report: str, rank_0: str, rank_1: str) -> None:
    assert re.search(r"rank \d of 2 has been in \w[\w ]* for \d+ s", report), report
    assert re.search(rf"^  rank 0: {rank_0}", report, re.MULTILINE), report
    assert re.search(rf"^  rank 1: {rank_1}", report, re.MULTILINE), report


@pytest.mark.slow  # two ranks for each; test_hang_watch.py is fast
@pytest.mark.parametrize("way", WAYS)
def test_every_rank_is_named_with_its_line(way: str, processes: Processes, tmp_path: Path) -> None:
    rest, *expected = WAYS[way]
    ranks = start(processes, write(tmp_path, rest, 12), "1")
    try:
        # The ranks that wait fail after 12 s, and with them the others are ended.
        next(rank for rank in ranks[::-1] if rank.wait(200))
        for rank in ranks:
            rank.kill()
        errors = [rank.communicate(60)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    reports = [text for error in errors for text in error.split("accel: ") if "has been in" in text]
    assert len(reports) == 1, errors
    check(reports[0], *expected)
    assert ("The ranks wait in different calls" in reports[0]) == (way not in ("user_code", "loader"))


@pytest.mark.slow  # a launcher and two ranks in new interpreters
@pytest.mark.parametrize("seconds", ["1", "0"])
def test_the_launcher_prints_it_once_and_again_with_the_error(seconds: str, tmp_path: Path) -> None:
    rest, *expected = WAYS["save_state"]
    script = write(tmp_path, rest, 12)
    words = ["--cpu", "--num_processes", "2", "--hang_report_seconds", seconds, str(script)]
    done = subprocess.run(
        [sys.executable, "-m", "accel_launch", "launch", *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    if seconds == "0":
        assert "has been in" not in done.stderr
        return
    live, again = done.stderr.split("accel launch: before that, ")
    assert live.count("has been in") == again.count("has been in") == 1 and "accel: " not in live, done.stderr
    assert live.index("accel launch: rank ") < live.index("failed first")
    check(live, *expected)
    check(again, *expected)

"""Resuming in scripts written for Accelerate, compared with Accelerate itself. Skipped where it is not installed.

``ACCEL_REFERENCE_PYTHON`` names an interpreter that has it. The same script runs on both, for every order of the data,
step of two epochs and way to leave out batches, in the object that saved the state and in a new one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from accel.utils import set_seed
from accel_compat import shim_path

REFERENCE_PYTHON = os.environ.get("ACCEL_REFERENCE_PYTHON")

pytestmark = [
    pytest.mark.skipif(
        REFERENCE_PYTHON is None, reason="name a Python that has the reference in ACCEL_REFERENCE_PYTHON"
    ),
    pytest.mark.slow,
    pytest.mark.timeout(3600),  # 320 resumed runs of up to 3 epochs, on each of the two
]

SCRIPT = """
import itertools, json, shutil, sys
import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch.utils.data import DataLoader

workers, folder, out = int(sys.argv[1]), sys.argv[2], sys.argv[3]
BATCHES, EPOCHS = 5, 3

class Run:
    def __init__(self, order):
        set_seed(7)
        config = DataLoaderConfiguration(use_seedable_sampler="seedable" in order)
        self.accelerator = Accelerator(cpu=True, dataloader_config=config)
        rows = torch.arange(2.0 * BATCHES * self.accelerator.num_processes)[:, None]
        loader = DataLoader(rows, batch_size=2, shuffle="shuffled" in order, num_workers=workers)
        self.loader = self.accelerator.prepare(loader)

    def train(self, start, done=0, idiom="none", save=None):
        seen = []  # batches, and a random number for each, as dropout draws one
        for epoch in range(start, EPOCHS):
            batches, resumes = self.loader, epoch == start
            if resumes and idiom == "skip":
                batches = self.accelerator.skip_first_batches(self.loader, done)
            if resumes and idiom == "islice":
                batches = itertools.islice(self.loader, done, None)
            for step, batch in enumerate(batches):
                if resumes and idiom == "continue" and step < done:
                    continue
                seen.append((batch.flatten().tolist(), torch.rand(()).item()))
                if save == (epoch, step + 1) and step + 1 < BATCHES:
                    self.accelerator.save_state(folder)
                    return seen
            if save == (epoch, BATCHES):
                self.accelerator.save_state(folder)
                return seen
        return seen

found = {}
for order in ("plain", "plain, seedable", "shuffled", "shuffled, seedable"):
    whole = Run(order).train(0)
    found[order] = whole
    for epoch, done in itertools.product(range(2), range(1, BATCHES + 1)):
        run = Run(order)
        # Each rank has its own state, but the first one removes what an earlier one left.
        run.accelerator.wait_for_everyone()
        if run.accelerator.is_main_process:
            shutil.rmtree(folder, ignore_errors=True)
        run.accelerator.wait_for_everyone()
        run.train(0, save=(epoch, done))
        start, left_out = (epoch + 1, 0) if done == BATCHES else (epoch, done)
        for idiom in ("none", "skip", "islice", "continue"):
            for name, resumed in (("same object", run), ("new object", Run(order))):
                resumed.accelerator.load_state(folder)
                seen = resumed.train(start, left_out, idiom)
                expected = whole[start * BATCHES + left_out:]
                if idiom == "none" and left_out:  # the epoch is repeated, with other random numbers
                    seen, expected = [one[:1] for one in seen[:BATCHES]], [one[:1] for one in whole[start * BATCHES:]]
                    expected = expected[:BATCHES]
                same = seen == expected, [one[0] for one in seen] == [one[0] for one in expected]
                found[f"{order}; {epoch}, {done}; {idiom}; {name}"] = "all" if same[0] else "batches" if same[1] else ""
with open(f"{out}_{Run('plain').accelerator.process_index}.json", "w") as file:
    json.dump(found, file)
Run("plain").accelerator.end_training()
"""


def run(python: str, folder: Path, processes: int, workers: int) -> list[dict[str, Any]]:
    """Run the script on some processes; for each, what of every resumed run equals the uninterrupted one."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("ACCELERATE_", "PYTHONPATH"))}
    shim = {"PYTHONPATH": str(shim_path())} if python == sys.executable else {}
    environment = {**kept, **shim, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    folder.mkdir()
    script = folder / "script.py"
    script.write_text(SCRIPT)
    launcher = (
        ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)] if processes > 1 else []
    )
    command = [python, *launcher, str(script), str(workers), str(folder / "state"), str(folder / "found")]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1700, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    return [json.loads((folder / f"found_{rank}.json").read_text()) for rank in range(processes)]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("processes", [1, 2])
def test_every_way_to_resume(tmp_path: Path, processes: int, workers: int) -> None:
    assert REFERENCE_PYTHON is not None
    ours = run(sys.executable, tmp_path / "ours", processes, workers)
    theirs = run(REFERENCE_PYTHON, tmp_path / "theirs", processes, workers)
    set_seed(7)
    plain = DataLoader(torch.arange(10.0 * processes)[:, None], batch_size=2, shuffle=True)
    batches = [batch.flatten().tolist() for batch in plain]
    for rank, (own, other) in enumerate(zip(ours, theirs, strict=True)):
        assert own.keys() == other.keys()
        uninterrupted = {case: own.pop(case) for case, value in list(own.items()) if isinstance(value, list)}
        assert [batch for batch, _ in uninterrupted["shuffled"]][:5] == batches[rank::processes], "the order of PyTorch"
        if processes > 1:  # where the reference seeds the sampler anew
            del uninterrupted["shuffled"]
        assert uninterrupted == {case: other[case] for case in uninterrupted}
        assert set(own.values()) == {"all"}, [case for case, value in own.items() if value != "all"]

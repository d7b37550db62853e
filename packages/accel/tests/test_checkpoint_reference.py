"""States go both ways between accel and the reference, on one process and on two. Skipped where the reference is not
installed.

``ACCEL_REFERENCE_PYTHON`` names an interpreter that has it; without the variable, this one is tried.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from accel_checkpoint.manifest import MANIFEST_NAME

REFERENCE_PYTHON = os.environ.get("ACCEL_REFERENCE_PYTHON") or (
    sys.executable if importlib.util.find_spec("accelerate") else None
)

pytestmark = [
    pytest.mark.skipif(
        REFERENCE_PYTHON is None,
        reason="the reference is not installed; name a Python that has it in ACCEL_REFERENCE_PYTHON",
    ),
    pytest.mark.slow,
    pytest.mark.timeout(900),  # twelve runs in fresh interpreters, each of which imports torch
]

# The same script for both: only the name of the library differs.
SCRIPT = """
import hashlib, importlib, json, random, sys
import numpy, torch
from torch import nn
from torch.utils.data import DataLoader

library, action, folder, safe, out = sys.argv[1:]
module = importlib.import_module(library)
torch.manual_seed(0 if action == "save" else 99)
random.seed(0); numpy.random.seed(0)
accelerator = module.Accelerator(cpu=True)
torch.manual_seed((0 if action == "save" else 99) + accelerator.process_index)

class Counter:
    count = 0
    def state_dict(self): return {"count": self.count}
    def load_state_dict(self, state): self.count = state["count"]

models = [nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 1)), nn.Linear(4, 1)]
if action == "load":
    for model in models:
        for parameter in model.parameters():
            nn.init.zeros_(parameter)
optimizers = [
    torch.optim.AdamW(models[0].parameters(), lr=0.05),
    torch.optim.SGD(models[1].parameters(), lr=0.1, momentum=0.9),
]
schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5) for optimizer in optimizers]
loader = DataLoader(torch.arange(96.0).reshape(24, 4) / 96, batch_size=3)
counter = Counter()
prepared = accelerator.prepare(*models, *optimizers, *schedulers, loader)
models, optimizers, schedulers, loader = prepared[:2], prepared[2:4], prepared[4:6], prepared[6]
accelerator.register_for_checkpointing(counter)

def epoch():
    for batch in loader:
        accelerator.backward(sum(model(batch).square().mean() for model in models))
        for each in (*optimizers, *schedulers):
            each.step()
        for optimizer in optimizers:
            optimizer.zero_grad()
        counter.count += 1

if action == "save":
    epoch()
    accelerator.save_state(folder, safe_serialization=safe == "True")
else:
    accelerator.load_state(folder)

def digest(values):
    return hashlib.sha256(b"".join(torch.as_tensor(value).numpy().tobytes() for value in values)).hexdigest()

def moments(optimizer):
    states = optimizer.state_dict()["state"].values()
    return [value for state in states for value in state.values() if value is not None]

seen = {
    "weights": [digest(accelerator.unwrap_model(model).state_dict().values()) for model in models],
    "moments": [digest(moments(optimizer)) for optimizer in optimizers],
    "rates": [scheduler.get_last_lr() for scheduler in schedulers],
    "count": counter.count,
    "drawn": [random.random(), float(numpy.random.random()), torch.rand(3).tolist()],
}
epoch()  # and both go on in the same way
seen["later"] = [digest(accelerator.unwrap_model(model).state_dict().values()) for model in models]
with open(f"{out}_{accelerator.process_index}.json", "w") as file:
    json.dump(seen, file)
accelerator.end_training()
"""


def run(python: str, library: str, action: str, folder: Path, safe: bool, processes: int) -> list[dict[str, Any]]:
    """Run the script on some processes, and return what each of them saw."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("ACCELERATE_", "PYTHONPATH"))}
    environment = {**kept, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    script, out = folder.parent / "script.py", folder.parent / f"{library}_{action}"
    script.write_text(SCRIPT)
    launcher = (
        ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)] if processes > 1 else []
    )
    command = [python, *launcher, str(script), library, action, str(folder), str(safe), str(out)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    return [json.loads(Path(f"{out}_{rank}.json").read_text()) for rank in range(processes)]


def own_names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {MANIFEST_NAME}


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("processes", [1, 2])
def test_both_directions(tmp_path: Path, processes: int, safe: bool) -> None:
    assert REFERENCE_PYTHON is not None
    theirs, ours = (tmp_path / name / "state" for name in ("theirs", "ours"))
    for folder in (theirs, ours):
        folder.parent.mkdir()
    saved_by_them = run(REFERENCE_PYTHON, "accelerate", "save", theirs, safe, processes)
    assert run(sys.executable, "accel", "load", theirs, safe, processes) == saved_by_them
    saved_by_us = run(sys.executable, "accel", "save", ours, safe, processes)
    assert run(REFERENCE_PYTHON, "accelerate", "load", ours, safe, processes) == saved_by_us
    assert saved_by_us == saved_by_them, "the same script trains the same with both"
    # Beyond theirs, ours has the position of the loader.
    assert own_names(ours) - own_names(theirs) <= {"dl_state_dict.bin"} and own_names(theirs) <= own_names(ours)

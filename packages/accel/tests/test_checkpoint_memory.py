"""What loading takes of host memory: the state itself and one file more, measured by the kernel."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

# 32 MiB of weights in four models; the state is three times that, with what Adam keeps.
SCRIPT = """
import re, sys, torch
from pathlib import Path
from accel import Accelerator

def peak():
    return int(re.search(r"VmHWM:\\\\s+(\\\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

def reset():
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew from what is used now

accelerator = Accelerator(cpu=True)
models = [torch.nn.Linear(1448, 1448, bias=False) for _ in range(4)]
optimizers = [torch.optim.Adam(model.parameters()) for model in models]
models, optimizers = list(accelerator.prepare(*models)), list(accelerator.prepare(*optimizers))
if sys.argv[1] == "save":
    for model, optimizer in zip(models, optimizers):
        accelerator.backward(model(torch.rand(2, 1448)).sum())
        optimizer.step()
    accelerator.save_state(sys.argv[2], safe_serialization=sys.argv[3] == "safe")
else:
    reset()
    before = peak()
    accelerator.load_state(sys.argv[2])
    print(peak() - before)
"""
WEIGHTS = 4 * 1448 * 1448 * 4
LARGEST_FILE = 2 * WEIGHTS // 4


@pytest.mark.slow  # saves and loads in fresh processes, to measure their memory; loading has fast tests
@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="the peak of a process's memory is read from Linux's /proc"
)
@pytest.mark.timeout(400)  # two fresh interpreters, which a busy machine keeps waiting
@pytest.mark.parametrize("format", ["safe", "torch"])
def test_the_peak_of_loading_is_under_one_copy_and_one_file(tmp_path: Path, format: str) -> None:
    words = [sys.executable, "-c", SCRIPT.replace("\\\\", "\\")]
    subprocess.run([*words, "save", str(tmp_path / "state"), format], check=True, timeout=190)
    result = subprocess.run(
        [*words, "load", str(tmp_path / "state")], check=True, timeout=190, capture_output=True, text=True
    )
    # The weights have their place already; the optimizers' state, twice their size, is new. The mapped weights count
    # while they are copied.
    assert int(result.stdout) < 3 * WEIGHTS + LARGEST_FILE
    assert int(result.stdout) > 2 * WEIGHTS, "less than what was loaded: the measurement is wrong"

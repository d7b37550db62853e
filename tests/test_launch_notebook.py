"""notebook_launcher in a real Jupyter kernel: a notebook of several cells, run by nbclient."""

from __future__ import annotations

import json
import subprocess

import pytest
from components.digits import ROOT, environment, loss_of_one_process, losses_in
from components.environments import find, missing

pytestmark = [
    pytest.mark.component,
    pytest.mark.skipif(bool(missing("notebook")), reason=missing("notebook") or "a Jupyter kernel is installed"),
]

# Runs the cells given as JSON, and prints the output and the error of each.
CLIENT = """
import json, sys
import nbformat
from nbclient import NotebookClient
from traitlets.config import Config
cells = json.load(open("cells.json"))
notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in cells])
# Sockets that are files of this folder: a port that was free when it was chosen may be taken when the kernel listens.
sockets = {"transport": "ipc", "ip": "kernel"}
waits = {"timeout": 150, "startup_timeout": 150, "iopub_timeout": 150}
config = Config({"KernelManager": sockets})
NotebookClient(notebook, allow_errors=True, kernel_name="python3", config=config, **waits).execute()
found = []
for cell in notebook.cells:
    text = "".join(output.get("text", "") for output in cell.outputs if output.get("name") == "stdout")
    errors = [f"{output['ename']}: {output['evalue']}" for output in cell.outputs if output.output_type == "error"]
    found.append([text, errors[0] if errors else ""])
print("CELLS " + json.dumps(found))
"""

TRAIN = f"""
import sys
sys.path.insert(0, {str(ROOT / "examples")!r})
import digits

def train(epochs, fail=False):
    from accel import Accelerator
    if fail and Accelerator().process_index == 1:
        raise ValueError("boom in a cell")
    digits.train(digits.parse(["--epochs", str(epochs), "--output_dir", ""]))
"""

# Output of a rank passes through another thread of the kernel, possibly after the rank has exited; output that arrives
# after the end of the cell is lost.
LATER = """
import time
time.sleep(3)
"""


@pytest.fixture
def notebook(tmp_path):
    """Run cells; the output and the error of each."""

    def run(*cells: str) -> list[list[str]]:
        (tmp_path / "cells.json").write_text(json.dumps(cells))
        (tmp_path / "client.py").write_text(CLIENT)
        folders = {
            name: str(tmp_path / name) for name in ("HOME", "IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR")
        }
        done = subprocess.run(
            [str(find("notebook")), "client.py"],
            cwd=tmp_path,
            env=environment(**folders),
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(done.stdout[done.stdout.rindex("CELLS ") + 6 :])

    return run


@pytest.mark.slow  # a kernel, and two times two processes that import scikit-learn
@pytest.mark.timeout(480)
def test_a_notebook_trains_fails_and_trains_again(notebook) -> None:
    trained, failed, after, alone = notebook(
        TRAIN + "from accel import notebook_launcher\nnotebook_launcher(train, (1,), num_processes=2)" + LATER,
        "notebook_launcher(train, (1, True), num_processes=2)",
        "print('the session goes on')\nnotebook_launcher(lambda: print('again', flush=True), num_processes=2, "
        "mixed_precision='bf16')",
        "from accel_state import PartialState\nPartialState(cpu=True)\nnotebook_launcher(train, (1,), num_processes=2)",
    )
    assert trained[1] == "" and losses_in(trained[0]) == pytest.approx([loss_of_one_process()], abs=1e-4), trained
    assert failed[1].startswith("LaunchError: accel launch: rank 1 of 2 failed first") and failed[1].endswith(
        "ValueError: boom in a cell"
    )
    assert after[1] == "" and "the session goes on" in after[0]
    assert alone[1].startswith("ConfigurationError: an Accelerator (or PartialState) exists already in this session")

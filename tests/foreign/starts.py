"""Starts two ranks in every way, and compares their rows with those of `accel launch`: ``starts.py [WAY]...``

Ways whose library or program is not installed are left out, and named.
"""

from __future__ import annotations

import argparse
import base64
import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

WAYS = Path(__file__).with_name("ways.py")
PYTHON = sys.executable
TORCHRUN = (PYTHON, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "{port}")
OURS = (PYTHON, "-m", "accel_launch", "launch", "--cpu", "--num_processes", "2", "-q")
DEEPSPEED = (
    *(PYTHON, "-m", "deepspeed.launcher.launch", "--master_addr", "127.0.0.1", "--master_port", "{port}"),
    f"--world_info={base64.urlsafe_b64encode(json.dumps({'localhost': [0, 1]}).encode()).decode()}",
)
MPIRUN = ("mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", PYTHON)
NOTEBOOK = """
import nbformat, nbclient, sys
cell = '''
import sys; sys.path.insert(0, {place!r})
import ways
from accel_launch import notebook_launcher
notebook_launcher(ways.row, ({folder!r},), num_processes=2)
'''
notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell)])
nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
"""

# By name: what must be installed, the command before `ways.py`, and the way.
STARTS: dict[str, tuple[str | None, tuple[str, ...], str]] = {
    "accel launch": (None, OURS, "script"),
    "torchrun": (None, TORCHRUN, "script"),
    "Fabric": ("lightning", (PYTHON,), "fabric"),
    "Fabric under torchrun": ("lightning", TORCHRUN, "fabric"),
    "Fabric under accel launch": ("lightning", OURS, "fabric"),
    "Trainer": ("lightning", (PYTHON,), "trainer"),
    "Trainer under torchrun": ("lightning", TORCHRUN, "trainer"),
    "Trainer under accel launch": ("lightning", OURS, "trainer"),
    "mp.spawn, env://": (None, (PYTHON,), "spawn_env"),
    "mp.spawn, tcp://": (None, (PYTHON,), "spawn_tcp"),
    "mp.spawn, file://": (None, (PYTHON,), "spawn_file"),
    "Ray actors": ("ray", (PYTHON,), "ray_actors"),
    "Ray Train": ("ray", (PYTHON,), "ray_train"),
    "mpirun": ("mpirun", MPIRUN, "script"),
    "mpi4py": ("mpi4py", MPIRUN, "mpi4py"),
    "DeepSpeed's launcher": ("deepspeed", DEEPSPEED, "script"),
    "joblib, concurrent.futures in a rank": ("joblib", OURS, "workers"),
    "joblib, concurrent.futures under torchrun": ("joblib", TORCHRUN, "workers"),
    "a notebook's kernel": ("nbclient", (PYTHON, "-c", NOTEBOOK), ""),
}
HIDDEN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_", "OMPI_", "PMI", "SLURM_", "ACCEL", "TORCHELASTIC_")


def expected() -> list[dict[str, Any]]:
    """The rows of two ranks on one machine, whose loader gives batches of 2 in turn."""
    batches = [[first, first + 1] for first in range(0, 22, 2)]
    batches.append(batches[0])  # completes the last round
    return [
        {
            **{"rank": rank, "world_size": 2, "local_rank": rank, "local_world_size": 2, "device": "cpu", "sum": 3},
            # The prepared loader drops nothing and ends equally: the last rank's spare batch repeats the first one.
            "samples": [sample for batch in batches[rank::2] for sample in batch],
        }
        for rank in range(2)
    ]


def version(needed: str | None) -> str | None:
    """The version of what a way needs; None if that is missing."""
    if needed is None:
        return importlib.metadata.version("torch")
    if needed == "mpirun":
        found = shutil.which("mpirun")
        text = (
            subprocess.run(["mpirun", "--version"], capture_output=True, text=True, check=False).stdout if found else ""
        )
        return text.split("\n")[0].rpartition(" ")[2] or None
    if needed == "mpi4py" and not shutil.which("mpirun"):
        return None
    return importlib.metadata.version(needed) if importlib.util.find_spec(needed) else None


def run(name: str, seconds: float) -> str:
    """Start two ranks in one way; returns "equal", or what is different."""
    from accel_state import get_free_port

    _, command, way = STARTS[name]
    environment = {key: value for key, value in os.environ.items() if not key.startswith(HIDDEN)}
    environment.update(OMP_NUM_THREADS="1", DS_ACCELERATOR="cpu", RAY_TRAIN_V2_ENABLED="1", PYTHONWARNINGS="ignore")
    environment["PYTHONPATH"] = os.pathsep.join([str(WAYS.parent), *filter(None, [environment.get("PYTHONPATH")])])
    with tempfile.TemporaryDirectory() as folder:
        port = str(get_free_port())
        words = [word.replace("{port}", port) for word in command]
        if way:
            words += [str(WAYS), way, folder]
        else:
            words[-1] = NOTEBOOK.format(place=str(WAYS.parent), folder=folder)
        done = subprocess.run(
            words, env=environment, capture_output=True, text=True, timeout=seconds, cwd=folder, check=False
        )
        rows = [json.loads(file.read_text()) for file in Path(folder).glob("*.json")]
    if done.returncode:
        return f"exit code {done.returncode}: {done.stderr[-3000:]}"
    distinct = sorted({json.dumps(row, sort_keys=True) for row in rows})
    wanted = sorted(json.dumps(row, sort_keys=True) for row in expected())
    return "equal" if distinct == wanted else f"different: {distinct}"


def main() -> int:
    """Run the ways; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ways", nargs="*", help="names of ways; default: all")
    parser.add_argument("--seconds", type=float, default=240.0, help="limit of each")
    arguments = parser.parse_args()
    failed = []
    print("| started by | version | rank, local rank, device, shares |\n| --- | --- | --- |")
    for name, (needed, _, _) in STARTS.items():
        if arguments.ways and name not in arguments.ways:
            continue
        found = version(needed)
        result = "not installed" if found is None else run(name, arguments.seconds)
        if found is not None and result != "equal":
            failed.append(f"{name}: {result}")
            result = "DIFFERENT"
        print(f"| {name} | {needed or 'torch'} {found or ''} | {result} |", flush=True)
    print("\n".join(failed), file=sys.stderr)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())

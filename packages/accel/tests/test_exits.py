"""How processes end whose script leaves things open: with the script's exit code, and never by SIGABRT."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from forks import Processes

from accel_state.ports import get_free_port

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(sys.platform != "linux", reason="the names of threads are read from /proc"),
]

# The first exit handler runs last, with only the teardown of the interpreter after it.
HEAD = """
import atexit, sys, threading
from pathlib import Path

def count_threads():
    names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
    print("gloo threads:", sum(name.startswith("pt_gloo") for name in names))

class Last:
    def __del__(self):
        print("torn down")

last = Last()
atexit.register(count_threads)
import torch
import torch.distributed as dist
from accel import Accelerator
accelerator = Accelerator(cpu=True, log_with="jsonl", project_dir="runs")
model, optimizer = torch.nn.Linear(4, 1), None
model = accelerator.prepare(model)
accelerator.backward(model(torch.rand(2, 4)).sum())
rank = accelerator.process_index
"""

ENDINGS = {
    "nothing": ("", 0),
    "in_flight": ("[dist.all_reduce(torch.ones(5_000_000), async_op=True) for _ in range(3)]", 0),
    "earlier": ("if rank == 1: dist.all_reduce(torch.ones(5_000_000), async_op=True)", 0),
    "another_group": ("dist.all_reduce(torch.ones(9), group=dist.new_group([0, 1]))", 0),
    "saves": ("accelerator.save_state('state', blocking=False)", 0),
    "tracks": ("accelerator.init_trackers('project'); accelerator.log({'loss': 1.0}, step=0)", 0),
    "exits_0": ("sys.exit(0)", 0),
    "ends_training": ("accelerator.end_training()", 0),
    "exits_3": ("sys.exit(3)", 3),
    "raises": ("raise ValueError('oh')", 1),
    "raises_in_flight": ("dist.all_reduce(torch.ones(5_000_000), async_op=True); raise ValueError('oh')", 1),
    # Nobody answers rank 1: its error must not wait for that.
    "raises_alone": ("if rank == 1: dist.all_reduce(torch.ones(9), async_op=True); raise ValueError('oh')", (0, 1)),
}
FAST = ["in_flight", "raises"]
SLOW = [
    pytest.param(name, marks=pytest.mark.slow) for name in ENDINGS if name not in FAST
]  # two starts of two ranks each
# As the launcher starts the file, and as torchrun does.
WORKER = "from accel_launch.elastic import worker; sys.argv = ['', 'script', str(os.getppid()), sys.argv[1]]"
STARTS = {
    "accel": f"import os, sys; {WORKER}; worker.main()",
    "torchrun": "import runpy, sys; runpy.run_path(sys.argv[1], run_name='__main__')",
}


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    with Processes("torch", "torch.distributed", "accel.accelerator", "accel_track") as server:
        yield server


def ends(processes: Processes, start: str, ending: str, folder: Path) -> list[tuple[int, str, str]]:
    """Run two ranks; return the exit code, the output and the errors of each."""
    script = folder / "script.py"
    script.write_text(textwrap.dedent(HEAD) + ending + "\n")
    address = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(get_free_port()),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
    }
    places = [{**address, "RANK": rank, "LOCAL_RANK": rank} for rank in "01"]
    programs = [
        processes.start(STARTS[start], str(script), cwd=folder, env={**os.environ, **place}) for place in places
    ]
    try:
        return [(program.returncode or 0, out, err) for program in programs for out, err in [program.communicate(200)]]
    finally:
        for program in programs:
            program.kill()


@pytest.mark.parametrize("name", [*FAST, *SLOW])
@pytest.mark.parametrize("start", STARTS)
def test_a_script_ends_with_its_exit_code(start: str, name: str, processes: Processes, tmp_path: Path) -> None:
    ending, code = ENDINGS[name]
    ended = ends(processes, start, ending, tmp_path)
    assert tuple(one[0] for one in ended) == (code if isinstance(code, tuple) else (code, code)), ended
    assert all(("ValueError: oh" in err) == (status == 1) for status, _, err in ended)
    for status, out, _ in ended:
        assert "gloo threads: " in out  # exit handlers have run
        if start == "accel" and name != "ends_training":
            assert "torn down" not in out  # where a thread that needs the GIL aborts the process
        elif status == 0:
            assert "gloo threads: 0\n" in out
    if name == "saves":
        assert (tmp_path / "state" / "model.safetensors").is_file()

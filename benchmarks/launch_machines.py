"""What launchers of several machines cost when nothing is wrong: their start, and the CPU of an idle one.

    python benchmarks/launch_machines.py [--machines 64] [--runs 3] [--against CHECKOUT]

All machines are launchers on this one, forked from a process that has imported torch, each with one process. CHECKOUT
is another version of the repository, whose figures are measured in turn with those of this one, and compared.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[1]
IDLE_SECONDS = 8.0


def fork_launchers(machines: int, port: int, script: str) -> list[int]:
    """Start a launcher for each machine, and return their process ids."""
    from accel_launch.cli import main

    common = [
        "launch",
        "--cpu",
        "--quiet",
        f"--num_machines={machines}",
        f"--num_processes={machines}",
        "--main_process_ip=127.0.0.1",
        f"--main_process_port={port}",
    ]
    pids = []
    for rank in range(machines):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                code = main([*common, f"--machine_rank={rank}", script])
            finally:
                os._exit(code)
        pids.append(pid)
    return pids


def measure(machines: int) -> None:
    """Print seconds for the start and end of all machines, and the CPU share of an idle launcher of two."""
    import accel_launch.commands.launch
    import accel_launch.elastic.run
    import accel_launch.launchers.elastic  # noqa: F401
    from accel_state.ports import get_free_port

    Path("noop.py").write_text("")
    Path("sleep.py").write_text("import time; time.sleep(3600)")
    begin = time.perf_counter()
    pids = fork_launchers(machines, get_free_port(), "noop.py")
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    seconds = time.perf_counter() - begin
    if any(codes):
        raise RuntimeError(f"exit codes {codes}")
    launchers = [psutil.Process(pid) for pid in fork_launchers(2, get_free_port(), "sleep.py")]
    while not all(launcher.children() for launcher in launchers):
        time.sleep(0.1)
    time.sleep(1)
    before = [sum(launcher.cpu_times()[:2]) for launcher in launchers]
    time.sleep(IDLE_SECONDS)
    idle = [sum(launcher.cpu_times()[:2]) - spent for launcher, spent in zip(launchers, before, strict=True)]
    for launcher in launchers:
        launcher.terminate()
        os.waitpid(launcher.pid, 0)
    print(seconds, max(idle) / IDLE_SECONDS)


def run(checkout: Path, machines: int) -> tuple[float, float]:
    """The figures of a checkout."""
    path = os.pathsep.join(str(source) for source in sorted(checkout.glob("packages/*/src")))
    hidden = ("ACCELERATE_", "TORCHELASTIC_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
    environment |= {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        environment["HF_HOME"] = folder
        words = [sys.executable, str(Path(__file__).resolve()), "--measure", "--machines", str(machines)]
        done = subprocess.run(words, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    seconds, idle = map(float, done.stdout.split()[-2:])
    return seconds, idle


def main() -> None:
    """Measure in turn, and print medians."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--machines", type=int, default=64)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--against", type=Path, metavar="CHECKOUT")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        measure(arguments.machines)
        return
    checkouts = [ROOT, *filter(None, (arguments.against,))]
    figures = [[run(checkout, arguments.machines) for checkout in checkouts] for _ in range(arguments.runs)]
    for index, name in enumerate(("here", "against")[: len(checkouts)]):
        seconds, idle = (statistics.median(figure[index][column] for figure in figures) for column in (0, 1))
        count = arguments.machines
        print(f"{name}: {count} machines start and end in {seconds:.1f} s; an idle launcher: {idle:.2%} CPU")
    if arguments.against:
        for column, what in enumerate(("the start", "an idle launcher")):
            ratio = statistics.median(round_[0][column] / round_[1][column] for round_ in figures)
            print(f"{what} takes {ratio:.2f} x that of the other checkout (target: at most 1, within noise)")


if __name__ == "__main__":
    main()

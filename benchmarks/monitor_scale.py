"""What reading a run of thousands of ranks costs: processor time and memory of `accel monitor` while all of them write.

    python benchmarks/monitor_scale.py [--ranks 4096] [--seconds 60] [--folder DIR]

One process writes what so many reporters would: each rank its counters every two seconds, and a line to keep every ten.
Another one reads all files and makes the page again and again with a second between, as `accel monitor` does.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import _measure

from accel_monitor.page import render
from accel_monitor.parts import NAMES
from accel_monitor.records import FOLDER, encode, encode_now, file_name, read_runs

INTERVAL, LINES_EVERY = 2.0, 5
STEP_SECONDS = 0.1


def line_of(rank: int, at: float) -> dict:
    """The counters of a rank after so many seconds; every 64th is slower in its data."""
    steps, slow = int(at / STEP_SECONDS), rank % 64 == 0
    parts = dict.fromkeys(NAMES, 0.0) | {"data": at * (0.3 if slow else 0.1), "forward": at * 0.2, "backward": at * 0.4}
    parts["waiting"] = at - sum(parts.values())
    counters = {"at": at, "parts": [round(parts[name], 6) for name in NAMES], "part": "backward", "step": steps}
    more = {"step_at": steps * STEP_SECONDS, "samples": 8 * steps, "tokens": 0, "loss": 2.0, "memory": 2**34}
    return {"kind": "sample", "id": f"run-{rank}", **counters, **more, "ran": at * 0.7, "queued": 0.0}


def write(folder: Path, ranks: int, seconds: float) -> None:
    """Write as so many reporters, in turn, for some seconds."""
    began = time.time()
    start = {
        "kind": "start",
        "format": 1,
        "replica": None,
        "world_size": ranks,
        "device": "cuda:0",
        "pid": 1,
        "step": 0,
    }
    start |= {"parts": NAMES, "time": began, "process_start": began - 30, "interval": INTERVAL}
    descriptors = []
    for rank in range(ranks):
        name = folder / file_name(None, rank)
        line = {**start, "id": f"run-{rank}", "rank": rank, "host": f"node{rank // 8}"}
        name.with_suffix(".jsonl").write_bytes(encode(line))
        descriptors.append(os.open(name.with_suffix(".now"), os.O_WRONLY | os.O_CREAT))
    turn = 0
    while (at := time.time() - began) < seconds:
        for rank, descriptor in enumerate(descriptors):
            line = line_of(rank, at)
            recent = {"last": line["step"], "own": [1000, 6000, 0, 0] * 28, "queued": 0.0, "held_is_mean": False}
            os.pwrite(descriptor, encode_now({**line, "host": f"node{rank // 8}", "recent": recent}), 0)
            if turn % LINES_EVERY == 0:
                with (folder / file_name(None, rank)).with_suffix(".jsonl").open("ab") as stream:
                    stream.write(encode(line))
        turn += 1
        time.sleep(max(0.0, began + turn * INTERVAL - time.time()))


def read(folder: Path, ranks: int, seconds: float) -> dict:
    """Read for some seconds; returns processor seconds of each page, and the peak of memory in MiB."""
    costs, end = [], time.time() + seconds
    while time.time() < end:
        began = time.process_time()
        (run,) = read_runs(folder)
        lines = list(render(run, 120, 40))
        costs.append(time.process_time() - began)
        if not lines[0].startswith(f"{ranks} ranks"):
            raise RuntimeError(f"the page begins with {lines[0]!r}")
        time.sleep(1.0)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"pages": len(costs), "seconds": statistics.median(costs), "last": costs[-1], "peak": peak}


def main() -> None:
    """Print what a page costs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4096)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--folder", type=Path, help="where the files are; by default a temporary directory")
    parser.add_argument("--role", choices=("write", "read"), help="used internally for the two processes")
    arguments = parser.parse_args()
    if arguments.role == "write":
        write(arguments.folder, arguments.ranks, arguments.seconds)
    elif arguments.role == "read":
        _measure.report(read(arguments.folder, arguments.ranks, arguments.seconds))
    else:
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            measure(Path(folder) / FOLDER, arguments.ranks, arguments.seconds)


def measure(folder: Path, ranks: int, seconds: float) -> None:
    """Run both processes and print."""
    folder.mkdir()
    words = [f"--ranks={ranks}", f"--folder={folder}"]
    writer = subprocess.Popen([sys.executable, __file__, "--role=write", f"--seconds={seconds + 3600}", *words])
    try:
        while len(list(folder.glob("*.now"))) < ranks:
            if writer.poll() is not None:
                raise RuntimeError("the writer has ended")
            time.sleep(0.2)
        figures = _measure.worker(
            sys.executable, __file__, "--role=read", f"--seconds={seconds}", *words, timeout=seconds * 5 + 120
        )
    finally:
        writer.kill()
        writer.wait()
    _measure.heading(f"Reading {ranks} ranks that write")
    _measure.row("a page, processor time", f"{figures['seconds']:.2f} s", f"(the last: {figures['last']:.2f} s)")
    _measure.row("peak of memory", f"{figures['peak']:.0f} MiB", f"({figures['pages']} pages)")


if __name__ == "__main__":
    main()

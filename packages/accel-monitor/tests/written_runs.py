"""Files of a run, as ranks write them, and a clock for recorders."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from accel_monitor import recorder

PARTS = ("startup", "data", "forward", "backward", "waiting", "optimizer", "saving", "loading", "evaluation")


def write(folder: Path, rank: int, world_size: int, *samples: dict, host: str = "far", end: bool | None = None) -> None:
    """A rank whose samples are dictionaries of seconds by part, with "step", "part" and "at"."""
    (folder / "monitor").mkdir(exist_ok=True)
    start = {"kind": "start", "id": "a", "replica": None, "rank": rank, "world_size": world_size, "host": host}
    lines = [{**start, "pid": 1, "step": 0, "time": 1000.0, "process_start": 999.0, "interval": 2.0}]
    for number, sample in enumerate(samples):
        last = end is not None and number == len(samples) - 1
        parts = [sample.get(part, 0.0) for part in PARTS] + [0.0, 0.0]
        line = {
            "id": "a",
            "at": sum(parts),
            "parts": parts,
            "samples": 4 * sample["step"],
            "loss": sample.get("loss", 0.5),
            "memory": 2**31,
        }
        line |= {"kind": "end" if last else "sample", "finished": end, "step": sample["step"], "part": sample["part"]}
        lines.append({**line, "step_at": sample.get("step_at", sum(parts))})
    file = folder / "monitor" / f"rank-{rank:05d}"
    file.with_suffix(".jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    file.with_suffix(".now").write_text("")


class Clock:
    """Stands for the clock of recorders that are made from now on; it moves when time is spent."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(recorder, "perf_counter", lambda: self.now)

    def spend(self, recorder: recorder.Recorder, part: int, seconds: float) -> None:
        """Spend time in a part of the loop."""
        recorder.mark(part)
        self.now += seconds

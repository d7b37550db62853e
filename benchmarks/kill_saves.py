"""Kill processes while they save and delete checkpoints, and check what the next one finds.

    python benchmarks/kill_saves.py [--kills 200] [--store 100] [--background 20] [--copies 30] [--seed 2026]

A process saves checkpoint after checkpoint, of which two are kept, and is killed by SIGKILL at a time that is drawn
from a window in which about two thirds of the processes complete a save. After each kill the newest complete checkpoint
must be at least the last one whose save had returned, and must load bit by bit what that step had; then the next
process continues after it. After the last one, a save must leave nothing unfinished. This is done on a file system
(--kills), on an S3 server in a process of its own (--store; moto), on the file system with saves in the background,
which another process writes (--background), and with copies of the file system's checkpoints on the S3 server, whose
newest complete one must load bit by bit too (--copies).

Runs are forked from a process that has everything loaded. A process that writes in the background starts over for each
of them, so these kills take seconds each.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import select
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from accel_checkpoint import AsyncSaver, Uploader, list_checkpoints, load, save, save_process
from accel_checkpoint.catalog import newest_complete
from accel_state import context

ROOT = Path(__file__).resolve().parents[1]
KEPT = 2


def state_of(step: int, elements: int) -> dict[str, Any]:
    """What a checkpoint of a step holds; every step has other values everywhere."""
    generator = torch.Generator().manual_seed(step)
    weights = torch.randint(0, 1 << 30, (elements,), generator=generator, dtype=torch.int32)
    return {"weights": weights, "averages": [weights[: elements // 2].float(), weights[:7].clone()], "step": step}


def same(found: Any, expected: Any) -> bool:
    """Whether two states are equal bit by bit."""
    if isinstance(expected, torch.Tensor):
        return bool(torch.equal(found, expected))
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(same(found[key], value) for key, value in expected.items())
    if isinstance(expected, list):
        return len(found) == len(expected) and all(map(same, found, expected))
    return bool(found == expected)


@dataclass
class Schedule:
    """A place, and how processes save there."""

    place: str
    elements: int
    background: bool = False
    copies: str = ""  # where copies go
    window: float = 0.3  # seconds that a process may live
    newest: int = 0  # the step of the newest complete checkpoint
    in_the_middle: int = 0  # kills that left an unfinished save
    copied: int = 0  # the step of the newest copy

    def live(self, channel: int) -> None:
        """Save without end, and tell when a save begins and when it has returned."""
        step = self.newest
        saver = AsyncSaver() if self.background else None
        uploader = Uploader(self.copies, KEPT) if self.copies else None
        save_process.MIN_BYTES = 0
        while True:
            step += 1
            state = state_of(step, self.elements)
            os.write(channel, b"b")
            if uploader is not None:
                uploader.upload(save(state, f"{self.place}/checkpoint_{step}", step=step), keep_here=KEPT)
                if uploader.in_flight and step % 2:
                    uploader.wait()  # a save takes milliseconds here, and an upload a second
            elif saver is None:
                save(state, f"{self.place}/checkpoint_{step}", step=step, keep=KEPT)
            else:
                saver.save(state, f"{self.place}/checkpoint_{step}", step=step, keep=KEPT)
                saver.wait()
            os.write(channel, b"e%d\n" % step)

    def kill_one(self, dice: random.Random) -> None:
        """Let a process live for a while, and see what it leaves."""
        reader, writer = os.pipe()
        pid = os.fork()
        if not pid:
            try:
                os.close(reader)
                with context.isolated():
                    self.live(writer)
            finally:
                os._exit(1)
        os.close(writer)
        content = os.read(reader, 1)  # the first save begins
        if self.background:  # which starts a process; afterwards a cycle is short
            while b"\n" not in content:
                content += os.read(reader, 1 << 16)
        self._wait(reader, dice.uniform(0, self.window))
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL, "the process failed by itself"
        while part := os.read(reader, 1 << 16):
            content += part
        os.close(reader)
        self._judge(content)

    @staticmethod
    def _wait(reader: int, seconds: float) -> None:
        """Wait, but not for a process that has ended."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            ready, _, _ = select.select([reader], [], [], left)
            if ready:
                time.sleep(min(left, 0.002))

    def _judge(self, content: bytes) -> None:
        returned = [int(part) for part in re.findall(rb"e(\d+)\n", content)]
        self.window *= 0.95 if returned else 1.1
        last = max([self.newest, *returned])
        self.in_the_middle += content.endswith(b"b")
        found = [info for info in list_checkpoints(self.place) if info.complete] if self._exists() else []
        if not found:
            assert last == 0, f"step {last} was saved, and there is no complete checkpoint"
            return
        loaded = load(newest_complete(self.place), rng=False)
        step = loaded["step"]
        assert last <= step <= last + 1, f"step {step} was loaded, and the save of {last} had returned"
        assert same(loaded, state_of(step, self.elements)), f"what was loaded of step {step} is not what was saved"
        self.newest = step
        copied = [info for info in list_checkpoints(self.copies) if info.complete] if self.copies else []
        if copied:
            loaded = load(newest_complete(self.copies), rng=False)
            step = loaded["step"]
            assert step <= self.newest, f"step {step} was copied, and {self.newest} is the newest"
            assert same(loaded, state_of(step, self.elements)), f"the copy of step {step} is not what was saved"
            self.copied = step

    def _exists(self) -> bool:
        return "://" in self.place or os.path.isdir(self.place)

    def left_after_a_save(self) -> list[str]:
        """Save once more; returns what is there besides the checkpoints that are kept."""
        step = self.newest + 1
        path = save(state_of(step, self.elements), f"{self.place}/checkpoint_{step}", step=step, keep=KEPT)
        kept = {f"checkpoint_{step}", f"checkpoint_{self.newest}"} if self.newest else {f"checkpoint_{step}"}
        if self.copies:
            uploader = Uploader(self.copies, KEPT)
            uploader.upload(path)
            uploader.close()
        there = sorted(set(os.listdir(self.place)) ^ kept) if "://" not in self.place else []
        if self.copies:
            kept = {f"checkpoint_{step}", f"checkpoint_{self.copied}"} if self.copied else {f"checkpoint_{step}"}
        return there + (
            self._left_in_store(self.copies or self.place, kept) if "://" in self.copies + self.place else []
        )

    @staticmethod
    def _left_in_store(place: str, kept: set[str]) -> list[str]:
        import s3_server

        bucket, _, prefix = place.partition("://")[2].partition("/")
        assert bucket == "bucket"
        keys = s3_server.keys(f"{prefix}/")
        unfinished = [key for key in keys if ".owner" in key or ".records" in key]
        return sorted({key.split("/")[0] for key in keys} ^ kept) + unfinished + s3_server.uploads()


def run(schedule: Schedule, kills: int, seed: int) -> str:
    """Kill that many processes; returns a row of the table."""
    dice = random.Random(seed)
    begin = time.monotonic()
    for number in range(kills):
        try:
            schedule.kill_one(dice)
        except Exception as error:
            raise AssertionError(f"kill {number} of seed {seed}: {error}") from error
    left = schedule.left_after_a_save()
    assert not left, f"left behind: {left}"
    taken = time.monotonic() - begin
    return f"| {kills} | {schedule.in_the_middle} | {schedule.newest} | {taken:.0f} |"


@contextlib.contextmanager
def store() -> Iterator[str]:
    """A place on an S3 server."""
    support = str(ROOT / "packages" / "accel-checkpoint" / "tests" / "support")
    if support not in sys.path:
        sys.path.append(support)
    from s3_server import s3_server

    with s3_server():
        yield "s3://bucket/killed"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200, help="on a file system")
    parser.add_argument("--store", type=int, default=100, help="on the S3 server")
    parser.add_argument("--background", type=int, default=20, help="on a file system, with saves in the background")
    parser.add_argument("--copies", type=int, default=30, help="on a file system, with copies on the S3 server")
    parser.add_argument("--seed", type=int, default=2026, help="of the times")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(
        "| where | kills | in the middle of a save | checkpoints saved | seconds |\n| --- | ---: | ---: | ---: | ---: |"
    )
    with tempfile.TemporaryDirectory(prefix="kill-saves-") as folder:
        save(state_of(1, 9), f"{folder}/warm", rng=False)  # loads what a save needs
        if options.kills:
            row = run(Schedule(f"{folder}/file-system", 100_000), options.kills, options.seed)
            print(f"| file system {row}", flush=True)
        if options.background:
            schedule = Schedule(f"{folder}/background", 100_000, background=True)
            print(f"| file system, in the background {run(schedule, options.background, options.seed)}", flush=True)
        if options.copies:
            with store() as place:
                schedule = Schedule(f"{folder}/copied", 100_000, copies=place, window=1.0)
                print(
                    f"| file system, copied to the S3 server {run(schedule, options.copies, options.seed)}", flush=True
                )
    if options.store:
        with store() as place:
            print(f"| S3 server {run(Schedule(place, 100_000, window=1.0), options.store, options.seed)}", flush=True)


if __name__ == "__main__":
    main()

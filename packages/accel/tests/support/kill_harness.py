"""Kills training runs in the middle of a save, and sees what the next run finds.

Every run is forked from a process that has torch loaded, so that it costs some hundredths of a second. A run loads the
newest checkpoint, compares it with what the run that saved it had noted down, trains a step, notes down what it is
about to save, and saves. It is killed by SIGKILL: by itself before its k-th operation on the file system, or by the
harness after some time.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import nn
from torch.utils.data import DataLoader

from accel import Accelerator, ProjectConfiguration
from accel_state import context
from accel_state.ports import reserved_port

OPERATIONS = ("open", "write", "fsync", "rename", "replace", "mkdir", "unlink", "rmdir", "chmod")


class Faults:
    """Counts what a process does to the file system, and kills it before the k-th operation, or in the middle of that.

    Args:
        fatal: k, from 0 on; None only counts.
        torn: in the middle: of a write, with half of the bytes written.
    """

    def __init__(self, fatal: int | None, torn: bool) -> None:
        self.fatal, self.torn, self.count = fatal, torn, 0
        self._lock = threading.Lock()

    def arm(self) -> None:
        """Begin. There is no way back: this process is meant to die."""
        for name in OPERATIONS:
            setattr(os, name, self._counted(getattr(os, name), name))
        # Written by native code, where no operation can be counted.
        safetensors.torch.save_file = self._counted(safetensors.torch.save_file, "save_file")

    def _counted(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with self._lock:
                fatal = self.count == self.fatal
                self.count += 1
                if fatal:
                    self._die(function, name, args, kwargs)
            return function(*args, **kwargs)

        return call

    def _die(self, function: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.torn and name == "write":
            function(args[0], args[1][: len(args[1]) // 2])
        elif self.torn and name == "save_file":
            function(*args, **kwargs)
            os.truncate(args[1], Path(args[1]).stat().st_size // 2)
        os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True)
class Plan:
    """How a run saves and dies.

    Attributes:
        folder: of the project; what is noted down lies in ``<folder>/notes``.
        blocking: of ``save_state``.
        replace: save to one path again and again, rather than by number.
        world_size: number of ranks.
    """

    folder: str
    blocking: bool = True
    replace: bool = False
    world_size: int = 1


class Trainee:
    """A small training run."""

    def __init__(self, plan: Plan) -> None:
        torch.manual_seed(0)
        settings = ProjectConfiguration(
            plan.folder, automatic_checkpoint_naming=not plan.replace, total_limit=None if plan.replace else 2
        )
        self.plan, self.accelerator = plan, Accelerator(cpu=True, project_config=settings)
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
        loader = DataLoader(torch.arange(6.0).reshape(6, 1).expand(6, 3).contiguous(), batch_size=1, shuffle=True)
        self.model, self.optimizer, self.scheduler, self.loader = self.accelerator.prepare(
            model, optimizer, scheduler, loader
        )

    @property
    def notes(self) -> Path:
        return Path(self.plan.folder) / "notes"

    def resume(self) -> int:
        """Load what is newest and compare it with what was noted down.

        Returns:
            The step that was reached; 0 if no run has ever finished a save.
        """
        if not list(self.notes.glob("saved_*")) and not self._found():
            return 0
        self.accelerator.load_state("latest")
        step = self.optimizer.steps_taken
        noted = json.loads((self.notes / f"step_{step}_{self.accelerator.process_index}.json").read_text())
        assert self.digest() == noted, f"what was loaded of step {step} is not what was saved"
        return int(step)

    def _found(self) -> list[Path]:
        folder = Path(self.plan.folder)
        return [*folder.glob("checkpoints/checkpoint_*"), *folder.glob("state"), *folder.glob(".state.accel-replaced")]

    def train_step(self) -> None:
        (batch,) = [next(iter(self.loader))]
        loss = (self.model(batch) + torch.rand(1)).square().mean()
        self.accelerator.backward(loss)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()

    def note(self) -> None:
        self.notes.mkdir(parents=True, exist_ok=True)
        path = self.notes / f"step_{self.optimizer.steps_taken}_{self.accelerator.process_index}.json"
        path.write_text(json.dumps(self.digest()))

    def digest(self) -> str:
        """Of all that a checkpoint has to bring back."""
        optimizer = self.optimizer.state_dict()
        values = [
            *self.model.state_dict().values(),
            *(value for state in optimizer["state"].values() for value in state.values()),
        ]
        plain = [
            optimizer["param_groups"],
            self.scheduler.state_dict(),
            random.getstate(),
            np.random.get_state()[1].tolist(),
        ]
        content = b"".join(torch.as_tensor(value).numpy().tobytes() for value in [*values, torch.get_rng_state()])
        return hashlib.sha256(content + repr(plain).encode()).hexdigest()

    def save(self) -> None:
        target = str(Path(self.plan.folder) / "state") if self.plan.replace else None
        self.accelerator.save_state(target, blocking=self.plan.blocking)
        self.accelerator.wait_for_save()


def live(plan: Plan, channel: int, fatal: int | None, torn: bool) -> None:
    """What a run does, from its first line to its last."""
    trainee = Trainee(plan)
    reached = trainee.resume()
    trainee.train_step()
    trainee.note()
    faults = Faults(fatal, torn)
    _tell(channel, {"resumed": reached})
    faults.arm()
    begin = time.monotonic()
    trainee.save()
    _tell(
        channel,
        {"saved": trainee.optimizer.steps_taken, "operations": faults.count, "seconds": time.monotonic() - begin},
    )


def _tell(channel: int, message: dict[str, Any]) -> None:
    os.write(channel, (json.dumps(message) + "\n").encode())


@dataclass
class Life:
    """What became of a run; ``seconds`` is how long its save took, if that got through."""

    resumed: list[int] = field(default_factory=list)
    saved: list[int] = field(default_factory=list)
    operations: int = 0
    codes: list[int] = field(default_factory=list)
    seconds: float = 0.0


class Harness:
    """Lets runs live and die.

    Args:
        plan: of all of them.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.step = 0
        self.kills = 0
        self.saves = 0

    def run(self, fatal: int | None = None, torn: bool = False, victim: int = 0, after: float | None = None) -> Life:
        """Start a run, and see what it finds.

        Args:
            fatal: which operation of the victim kills it.
            torn: kill in the middle of the operation.
            victim: the rank that is killed; the others are killed when it is gone, as a launcher does.
            after: seconds after which all ranks are killed.
        """
        life = Life()
        with (
            reserved_port() as port,
            _ranks(self.plan, lambda rank: fatal if rank == victim else None, torn, port) as ranks,
        ):
            for rank in ranks:
                life.resumed += [message["resumed"] for message in rank.read(1)]
            if after is not None:
                time.sleep(after)
                for rank in ranks:
                    os.kill(rank.pid, signal.SIGKILL)
            life.codes = _wait(ranks, victim)
            for rank in ranks:
                for message in rank.read(2):
                    life.saved.append(message["saved"])
                    life.operations = max(life.operations, message["operations"])
                    life.seconds = max(life.seconds, message["seconds"])
        self._judge(life)
        return life

    def _judge(self, life: Life) -> None:
        assert len(set(life.resumed)) == 1 and len(life.resumed) == self.plan.world_size, (
            f"not every rank came to load a state: {life}"
        )
        assert life.resumed[0] == self.step, (
            f"step {life.resumed[0]} was loaded, and {self.step} was the newest complete one"
        )
        if life.saved:
            (Path(self.plan.folder) / "notes" / f"saved_{life.saved[0]}").touch()
            assert set(life.saved) == {self.step + 1}
            self.saves += 1
        # A rank that is left alone may notice before it is killed too.
        allowed = (0, -signal.SIGKILL) if self.plan.world_size == 1 else (0, 1, -signal.SIGKILL)
        assert all(code in allowed for code in life.codes) and (life.saved or -signal.SIGKILL in life.codes), life
        self.kills += -signal.SIGKILL in life.codes
        self.step = max([self.step, *life.saved, *self._on_disk()])

    def _on_disk(self) -> list[int]:
        """The steps of checkpoints that are under their own names: they must be whole."""
        folder = Path(self.plan.folder)
        found = [
            *folder.glob("checkpoints/checkpoint_*"),
            *(list(folder.glob("state")) or folder.glob(".state.accel-replaced")),
        ]
        return [json.loads((path / "accel_manifest.json").read_text())["counters"]["optimizer_steps"] for path in found]

    def leftovers(self) -> list[str]:
        folder = Path(self.plan.folder)
        places = [place for place in (folder, folder / "checkpoints") if place.is_dir()]
        return [name for place in places for name in os.listdir(place) if name.startswith(".")]


@dataclass
class _Forked:
    pid: int
    channel: int
    _buffer: bytes = b""
    _code: int | None = None

    def read(self, number: int) -> list[dict[str, Any]]:
        """The messages after the first ``number - 1``, as soon as there is one, or the run has ended."""
        while b"\n" not in self._buffer:
            chunk = os.read(self.channel, 65536)
            if not chunk:
                return []
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        return [json.loads(line)]


@contextmanager
def _ranks(plan: Plan, fatal: Callable[[int], int | None], torn: bool, port: int) -> Iterator[list[_Forked]]:
    ranks = []
    try:
        for rank in range(plan.world_size):
            ranks.append(_fork(plan, rank, fatal(rank), torn, port))
        yield ranks
    finally:
        for rank in ranks:
            os.close(rank.channel)


def _fork(plan: Plan, rank: int, fatal: int | None, torn: bool, port: int) -> _Forked:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writer)
        return _Forked(pid, reader)
    code = 1
    try:
        os.close(reader)
        world = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": plan.world_size,
            "LOCAL_WORLD_SIZE": plan.world_size,
            "MASTER_PORT": port,
        }
        os.environ.update({key: str(value) for key, value in world.items()}, MASTER_ADDR="127.0.0.1")
        live(plan, writer, fatal, torn)
        code = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(code)
    raise AssertionError("not reached")


def _wait(ranks: list[_Forked], victim: int) -> list[int]:
    """Wait for all; when one has died by a signal, kill the others, as a launcher does."""
    codes: dict[int, int] = {}
    while len(codes) < len(ranks):
        pid, status = os.wait()
        codes[pid] = os.waitstatus_to_exitcode(status)
        if codes[pid]:
            for rank in ranks:
                if rank.pid not in codes:
                    os.kill(rank.pid, signal.SIGKILL)
    return [codes[rank.pid] for rank in ranks]


def warm_up(folder: str) -> None:
    """Live once in this process, so that the runs that are forked from it find every module loaded."""
    torch.set_num_threads(1)
    with context.isolated():
        trainee = Trainee(Plan(folder, blocking=False))
        trainee.train_step()
        trainee.note()
        trainee.save()
        trainee.resume()
    shutil.rmtree(folder)


def kill_at_every_operation(plan: Plan, torn: bool, victim: int = 0, stride: int = 1) -> tuple[int, list[str]]:
    """Kill a run before (or in the middle of) each operation of a save, one run an operation, until a save gets
    through.

    Returns:
        The number of kills, and what is left lying about in the end.
    """
    harness, operation = Harness(plan), 0
    harness.run()
    while not harness.run(fatal=operation, torn=torn, victim=victim).saved:
        operation += stride
    harness.run()
    return harness.kills, harness.leftovers()


def kill_at_random_times(plan: Plan, count: int, seed: int) -> tuple[int, int, list[str]]:
    """Kill runs at random times from the beginning of a save to a little after its end.

    Returns:
        The number of kills that came before the save had ended, and after that; and what is left lying about in the
        end.
    """
    harness, dice = Harness(plan), random.Random(seed)
    taken = [harness.run().seconds for _ in range(5)]
    while harness.kills < count:
        # A bit more than it takes now, so that the last operations have their share too.
        life = harness.run(after=dice.uniform(0, 1.1 * statistics.median(taken[-5:])))
        taken += [life.seconds] if life.saved else []
    killed, saved = harness.kills, harness.saves
    harness.run()
    return killed, saved, harness.leftovers()

"""Fault-tolerant replicas: each is a process of its own, and only those that die are restarted."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from types import FrameType

import psutil

from accel_state.env import read_str
from accel_state.errors import ConfigurationError, MissingDependencyError
from accel_state.options import FaultToleranceOptions
from accel_state.ports import get_free_port

from ..elastic.report import shell_exit_code, signal_name
from ..interpreter import python_command
from ..launch_context import LaunchMode
from ..launch_plan import LaunchPlan
from .base import Launcher, MachineCommand
from .rank import worker_command

_LOOK_SECONDS = 0.1
# A look that took longer, because this machine was suspended, counts as this much.
_LONGEST_LOOK = 1.0
_GRACE_SECONDS = 30.0
_FAILURES_IN_A_ROW = 3
_START_LIMIT = 300.0
_JOINING = 10

# The arguments are those of torchft's class.
_LIGHTHOUSE = (
    "import sys, threading; from torchft.coordination import LighthouseServer; "
    "server = LighthouseServer(sys.argv[1], *map(int, sys.argv[2:])); threading.Event().wait()"
)


@dataclass
class Replica:
    """One replica, over all its restarts."""

    number: int
    progress: Path  # the file in which it reports its steps
    process: subprocess.Popen[bytes] | None = None
    restarts: int = 0
    failures: int = 0  # in a row, without a step between them
    state: str = ""  # its last report: "waits" (for the others), "computes" or "finished"; empty before the first
    has_computed: bool = False  # whether the running process has taken part in a step
    silent: float = 0.0  # seconds since its last report, or its start
    stopped: float = 0.0  # seconds for which the system has not run it (SIGSTOP)
    seen: int = 0  # the latest modification time
    done: bool = False

    def read(self) -> None:
        """Read the last report."""
        try:
            self.state = self.progress.read_text(encoding="utf-8").partition(" ")[0]
        except OSError:
            self.state = ""
        self.has_computed = self.has_computed or self.state == "computes"

    def waited(self, limit: float) -> bool:
        """Whether it has waited for the others for so long that one of them must hang."""
        # One that joins waits while the others compute something long together, such as an evaluation.
        return self.state == "waits" and self.silent > (limit / 2 if self.has_computed else _JOINING * limit)


@dataclass
class _Run:
    """The processes of a run."""

    plan: LaunchPlan
    options: FaultToleranceOptions
    directory: Path
    port: int
    replicas: list[Replica] = field(default_factory=list)
    lighthouse: subprocess.Popen[bytes] | None = None
    signal: int = 0
    late_failure: int = 0  # how a replica ended after others had finished the run

    def say(self, text: str) -> None:
        if not self.plan.quiet:
            print(f"accel launch: {text}", file=sys.stderr, flush=True)

    def start_lighthouse(self) -> None:
        options, tick = self.options, 20
        limits = (round(1000 * options.replica_timeout), tick, round(1000 * options.heartbeat_timeout))
        numbers = map(str, (options.min_replicas, *limits))
        command = [*python_command("-c", _LIGHTHOUSE), f"[::]:{self.port}", *numbers]
        log = None if self.plan.debug else subprocess.DEVNULL
        self.lighthouse = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)

    def start(self, replica: Replica) -> None:
        environment = {**self.plan.full_environment(), **variables(replica, self.port, self.directory)}
        command = worker_command(self.plan.entrypoint, os.getpid())
        replica.progress.unlink(missing_ok=True)
        # A session of its own: a signal from the terminal reaches the launcher, which forwards it.
        replica.process = subprocess.Popen(command, env=environment, start_new_session=True)
        replica.state, replica.has_computed, replica.seen = "", False, 0
        replica.silent = replica.stopped = 0.0

    def look(self, seconds: float) -> int | None:
        """Restart what has died; the exit code of the run once it has ended."""
        lighthouse = self.lighthouse
        if lighthouse is not None and lighthouse.poll() is not None:
            self.say(f"the lighthouse ended ({_ending(lighthouse.returncode)}); starting it again")
            self.start_lighthouse()
        for replica in self.replicas:
            process = replica.process
            if process is None:
                continue
            self._watch(replica, seconds)
            code = process.poll()
            if code is not None:
                failed = self._ended(replica, code)
                if failed:
                    return shell_exit_code(code)
        return None if any(replica.process for replica in self.replicas) else shell_exit_code(self.late_failure)

    def _ended(self, replica: Replica, code: int) -> bool:
        """Take note of the end of a replica's process; whether the run has failed."""
        replica.process = None
        if code == 0:
            self._finished(replica)
            return False
        if self.signal:
            return False
        if any(other.done for other in self.replicas):
            # It may have been the one that saves, so this is not hidden.
            self.say(f"replica {replica.number} ended ({_ending(code)}) after others had finished the run")
            self.late_failure = self.late_failure or code
            return False
        replica.failures = 0 if replica.has_computed and code < 0 else replica.failures + 1
        limit = self.plan.rendezvous.max_restarts
        if replica.failures >= _FAILURES_IN_A_ROW or (limit and replica.restarts >= limit):
            self.say(
                f"replica {replica.number} ended ({_ending(code)}) after {replica.restarts} restarts, and the run "
                "ends: " + (f"--max_restarts is {limit}" if limit else f"it failed {replica.failures} times in a row")
            )
            return True
        replica.restarts += 1
        self.say(f"replica {replica.number} ended ({_ending(code)}); restarting it, the others go on")
        self.start(replica)
        return False

    def _finished(self, replica: Replica) -> None:
        """Note that a replica is at the end of the run, where the others are too.

        One that is only starting would begin a run of its own.
        """
        replica.done = True
        for other in self.replicas:
            if other.process is not None and not (other.has_computed or other.done):
                _end(other.process, signal.SIGKILL)
                other.process.wait()
                other.process = None

    def _watch(self, replica: Replica, seconds: float) -> None:
        """Kill a replica that hangs while others wait for it."""
        process = replica.process
        assert process is not None
        seconds = min(seconds, _LONGEST_LOOK)
        modified = _modified(replica.progress)
        replica.silent = 0.0 if modified != replica.seen else replica.silent + seconds
        replica.seen = modified
        replica.read()
        if replica.state == "finished" and not replica.done:
            self._finished(replica)
        with suppress(psutil.Error):
            stopped = psutil.Process(process.pid).status() == psutil.STATUS_STOPPED
            replica.stopped = replica.stopped + seconds if stopped else 0.0
        limit = self.options.replica_timeout
        # While nobody waits for it, it may compute for long: an evaluation, for example.
        others = [other for other in self.replicas if other is not replica and other.process is not None]
        missed = any(other.waited(limit) for other in others)
        lags = replica.state == "computes" and replica.silent > limit and missed
        if replica.stopped > limit or lags or (not replica.state and replica.silent > _START_LIMIT + limit):
            self.say(f"replica {replica.number} makes no progress; killing it")
            _end(process, signal.SIGKILL)
            process.wait()

    def stop(self) -> None:
        """End everything that is still running."""
        running = [replica.process for replica in self.replicas if replica.process is not None]
        for process in running:
            _end(process, signal.SIGTERM)
        deadline = time.monotonic() + (_GRACE_SECONDS if self.signal else 1.0)
        for process in running:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
            _end(process, signal.SIGKILL)
            process.wait()
        if self.lighthouse is not None:
            self.lighthouse.kill()
            self.lighthouse.wait()


class FaultTolerantLauncher(Launcher):
    """Starts torchft's lighthouse and the replicas, and restarts those that end before the run does."""

    def accepts(self, plan: LaunchPlan) -> bool:
        """Whether --ft was given for this machine."""
        return plan.mode is LaunchMode.LOCAL and bool(plan.option("ft"))

    def run(self, plan: LaunchPlan) -> int:
        if find_spec("torchft") is None:
            raise MissingDependencyError("--ft needs the module torchft. Install it with: pip install 'accel[ft]'")
        if plan.rendezvous.tee != "0" or plan.rendezvous.log_dir is not None:
            raise ConfigurationError("--ft keeps no log files: leave out --tee and --log_dir, and redirect the output.")
        options = plan.settings.group(FaultToleranceOptions)
        directory = Path(tempfile.mkdtemp(prefix="accel_launch_"))
        run = _Run(plan, options, directory, get_free_port())
        try:
            with _signals(run):
                run.start_lighthouse()
                for number in range(options.num_replicas + options.num_spares):
                    replica = Replica(number, directory / f"replica_{number}")
                    run.replicas.append(replica)
                    run.start(replica)
                return _wait(run)
        finally:
            run.stop()
            shutil.rmtree(directory, ignore_errors=True)

    def commands(self, plan: LaunchPlan) -> Sequence[MachineCommand]:
        """The replicas, with variables of which some are known only when they start."""
        options = plan.settings.group(FaultToleranceOptions)
        command = plan.entrypoint.command(python_command("-u"))
        count = options.num_replicas + options.num_spares
        replicas = [{"ACCELERATE_FT_REPLICA": str(number), "RANK": "0", "WORLD_SIZE": "1"} for number in range(count)]
        notes = [
            "TORCHFT_LIGHTHOUSE: torchft's lighthouse, which this command starts on a port that is free then",
            "a replica that ends before the run does is restarted, while the others go on",
        ]
        return [MachineCommand("this machine", command, plan.environment, replicas, notes)]


def variables(replica: Replica, port: int, directory: Path) -> dict[str, str]:
    """The variables of a replica's process."""
    return {
        "TORCHFT_LIGHTHOUSE": f"http://localhost:{port}",
        # torchft would write ten lines a step, and torch the C++ frames of each lost connection.
        "RUST_LOG": read_str("RUST_LOG", "error") or "",
        "TORCH_CPP_LOG_LEVEL": read_str("TORCH_CPP_LOG_LEVEL", "FATAL") or "",
        "ACCELERATE_FT_REPLICA": str(replica.number),
        "ACCELERATE_FT_RESTARTS": str(replica.restarts),
        "ACCELERATE_FT_DIRECTORY": str(directory),
        **{"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"},
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(get_free_port())},
    }


def _wait(run: _Run) -> int:
    before = time.monotonic()
    while True:
        time.sleep(_LOOK_SECONDS)
        now = time.monotonic()
        code = run.look(now - before)
        before = now
        if run.signal:
            run.say(f"ended by {signal_name(run.signal)}")
            return 128 + run.signal
        if code is not None:
            return code


@contextmanager
def _signals(run: _Run) -> Iterator[None]:
    """Note the first signal that asks the launcher to end."""

    def note(number: int, _: FrameType | None) -> None:
        run.signal = run.signal or number

    numbers = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
    former: Mapping[int, object] = {number: signal.signal(number, note) for number in numbers}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)  # type: ignore[arg-type]


def _end(process: subprocess.Popen[bytes], number: int) -> None:
    """Send a signal to a replica and to what it started, such as the workers of its loaders."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


def _ending(code: int) -> str:
    return signal_name(-code) if code < 0 else f"exit code {code}"


def _modified(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0

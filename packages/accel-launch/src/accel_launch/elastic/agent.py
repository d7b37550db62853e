"""torch's elastic agent, with log folders we know, signals that arrive, and an exit barrier that ends when another machine failed."""

from __future__ import annotations

import contextlib
import logging
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server import WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest, Std

from accel_state.preemption import Note

from .preemption import grace_seconds, let_save, saved_by_all
from .signals import SignalWatch

EXIT_BARRIER_SECONDS = 300.0
_POLL_SECONDS = 0.2
_STATE_KEY = "accel/exit/"
_AGENT_LOGS = ("torch.distributed.elastic", "torch.multiprocessing.spawn")


class LogFolders(DefaultLogsSpecs):
    """torch's log folders, which also remembers where each local rank of the current start reports to.

    Args:
        log_dir: base folder.
        tee: streams by local rank that go to a file as well as to the screen.
        on_restart: called before processes are started again, with the number of the restart, and the state that they saved because
            they were told to end, or None.
    """

    def __init__(self, log_dir: str, tee: Std | dict[int, Std], on_restart: Callable[[int, Note | None], None]) -> None:
        super().__init__(log_dir=log_dir, tee=tee)
        self._on_restart = on_restart
        self.folders: dict[int, Path] = {}

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Make the folders of one start."""
        restart = int(envs[0].get("TORCHELASTIC_RESTART_COUNT", "0"))
        if self.folders:
            self._on_restart(restart, saved_by_all(self.folders))
        destination = super().reify(envs)
        self.folders = {local_rank: Path(file).parent for local_rank, file in destination.error_files.items()}
        return destination


class Agent(LocalElasticAgent):
    """The agent of this machine.

    Args:
        spec: what to start.
        logs: where the ranks report to.
        watch: hears the signals to this launcher.
        start_method: see :class:`Job`.
        line_prefix: likewise.
    """

    def __init__(self, spec: WorkerSpec, logs: LogFolders, watch: SignalWatch, start_method: str, line_prefix: str | None) -> None:
        super().__init__(
            spec, logs, start_method=start_method, exit_barrier_timeout=EXIT_BARRIER_SECONDS, log_line_prefix_template=line_prefix
        )
        self._logs = logs
        self._watch = watch
        watch.ranks = self.pids
        watch.grace = lambda number: grace_seconds(logs.folders, number)
        self.failed_elsewhere: list[int] = []

    def _start_workers(self, worker_group: Any) -> Any:
        pids = super()._start_workers(worker_group)
        self._watch.install()
        return pids

    def pids(self) -> list[int]:
        """The processes of the ranks of this machine."""
        return [worker.id for worker in self.get_worker_group().workers if isinstance(worker.id, int) and worker.id > 0]

    def _rendezvous(self, worker_group: Any) -> None:
        # torch keeps the store of the ranks over a restart, and with it the addresses of those that are gone: gloo then connects to them
        # or to the new ones, whichever it reads first. Without these two the rendezvous makes a new store.
        handler = worker_group.spec.rdzv_handler
        for name in ("_shared_tcp_store_server", "_bootstrap_store_info"):
            if hasattr(handler, name):
                setattr(handler, name, None)
        super()._rendezvous(worker_group)

    def _shutdown(self, death_sig: Any = signal.SIGTERM, *args: Any, **kwargs: Any) -> None:
        if self._watch.received is not None:
            # torch kills ranks that have not ended after half a minute; a big training takes longer to save.
            let_save(self._logs.folders, self._watch.received)
        super()._shutdown(death_sig, *args, **kwargs)

    def _monitor_workers(self, worker_group: Any) -> Any:
        result = super()._monitor_workers(worker_group)
        if self._watch.forwarded is not None and saved_by_all(self._logs.folders) is not None:
            # The whole machine is about to go, not one rank of it.
            self._remaining_restarts = 0
        return result

    def _exit_barrier(self) -> None:
        # torch's own barrier is one call into the store: deaf to signals, and it waits its five minutes out for an agent that failed.
        group = self.get_worker_group()
        if (group.group_world_size or 1) > 1:
            post_state(self, "succeeded")
            self.failed_elsewhere = _wait_for_others(group.store, int(group.group_rank or 0), int(group.group_world_size or 1))


def post_state(agent: Agent, state: str) -> None:
    """Tell the agents of the other machines how this one ended."""
    group = agent.get_worker_group()
    if group.store is None or (group.group_world_size or 1) == 1:
        return
    try:
        group.store.set(f"{_STATE_KEY}{group.group_rank}", state)
    except RuntimeError as error:
        # The store lives on the machine of rank 0, which may have ended before.
        print(f"accel launch: machine rank 0 cannot be told that this machine {state}: {error}", file=sys.stderr)


def _wait_for_others(store: Any, rank: int, world_size: int) -> list[int]:
    """Wait until every machine has posted how it ended; return the ranks of those that failed, as soon as there is one."""
    others = [other for other in range(world_size) if other != rank]
    deadline = time.monotonic() + EXIT_BARRIER_SECONDS
    while others and time.monotonic() < deadline:
        try:
            ended = [other for other in others if store.check([f"{_STATE_KEY}{other}"])]
            failed = [other for other in ended if store.get(f"{_STATE_KEY}{other}") == b"failed"]
        except RuntimeError:
            # The machine of rank 0, which holds the store, has left: it does so last, unless it failed.
            return []
        if failed:
            return failed
        others = [other for other in others if other not in ended]
        time.sleep(_POLL_SECONDS)
    return []


def parse_tee(text: str) -> Std | dict[int, Std]:
    """``--tee`` as torch takes it."""
    if ":" not in text:
        return Std(int(text))
    return {int(rank): Std(int(streams)) for rank, _, streams in (entry.partition(":") for entry in text.split(","))}


@contextlib.contextmanager
def quiet_torch_logs() -> Iterator[None]:
    """Keep the agent's own log off the screen: what went wrong is told by the report, once."""
    names = [name for name in logging.root.manager.loggerDict if name.startswith(_AGENT_LOGS)]
    levels = {logger: logger.level for logger in map(logging.getLogger, {*names, *_AGENT_LOGS})}
    for logger in levels:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)

"""torch's elastic agent, with log folders we know, signals that arrive, and an exit barrier that ends when another
machine failed.
"""

from __future__ import annotations

import contextlib
import logging
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server import RunResult, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.events import Event, EventSource
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest, MultiprocessContext, Std

from accel_state.preemption import Note

from .exit_barrier import ENDED, EXIT_BARRIER_SECONDS, FAILED, SUCCEEDED, Ends, farewell_seconds
from .log_tee import whole_output
from .preemption import grace_seconds, let_save, notes, saved_by_all
from .signals import SignalWatch
from .static_rendezvous import RoundsRendezvous

_AGENT_LOGS = ("torch.distributed.elastic", "torch.multiprocessing.spawn")


class LogFolders(DefaultLogsSpecs):
    """torch's log folders, which also remembers where each local rank of the current start reports to.

    Args:
        log_dir: base folder.
        tee: streams by local rank that go to a file as well as to the screen.
        on_restart: called before processes are started again, with the number of the restart, and the state that they
            saved because they were told to end, or None.
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

    def __init__(
        self, spec: WorkerSpec, logs: LogFolders, watch: SignalWatch, start_method: str, line_prefix: str | None
    ) -> None:
        super().__init__(
            spec,
            logs,
            start_method=start_method,
            exit_barrier_timeout=EXIT_BARRIER_SECONDS,
            log_line_prefix_template=line_prefix,
        )
        self._logs = logs
        self._watch = watch
        watch.ranks = self.pids
        watch.grace = lambda number: grace_seconds(logs.folders, number)
        watch.farewell = lambda: farewell_seconds(spec.monitor_interval) if self._ends() is not None else 0.0
        self.failed_elsewhere: list[int] = []
        """Ranks of machines whose processes failed while those of this one did not."""
        self.last_failure: RunResult | None = None
        """How processes of this machine failed, the last time that they did."""

    def _start_workers(self, worker_group: Any) -> Any:
        with self._watch.starting_ranks(forks=self._start_method == "fork"), whole_output():
            pids = super()._start_workers(worker_group)
            for worker in worker_group.workers:
                worker.id = pids[worker.local_rank]
        return pids

    def pids(self) -> list[int]:
        """The processes of the ranks of this machine."""
        return [worker.id for worker in self.get_worker_group().workers if isinstance(worker.id, int) and worker.id > 0]

    def _construct_event(self, state: str, source: EventSource, *args: Any, **kwargs: Any) -> Event:
        # torch's has this host's full name in it, which it asks the name service for, once an event: where that does
        # not answer, a launch # takes minutes. Nobody reads the events unless a handler for them is installed, and here
        # none can be.
        return Event(f"torchelastic.worker.status.{state}", source)

    def _rendezvous(self, worker_group: Any) -> None:
        handler = worker_group.spec.rdzv_handler
        if isinstance(handler, RoundsRendezvous):
            super()._rendezvous(worker_group)
            # One failure is one restart, however many machines it makes fail: all count alike.
            self._remaining_restarts = worker_group.spec.max_restarts - handler.round
            return
        # torch keeps the store of the ranks over a restart, and with it the addresses of those that are gone: gloo then
        # connects to them # or to the new ones, whichever it reads first. Without these two the rendezvous makes a new
        # store.
        names = [name for name in ("_shared_tcp_store_server", "_bootstrap_store_info") if hasattr(handler, name)]
        # Kept until all machines have met again: ranks that still run elsewhere would fail without it.
        former = [getattr(handler, name) for name in names]
        for name in names:
            setattr(handler, name, None)
        super()._rendezvous(worker_group)
        del former

    def _shutdown(self, death_sig: Any = signal.SIGTERM, *args: Any, **kwargs: Any) -> None:
        if self._watch.received is not None:
            # torch kills ranks that have not ended after half a minute; a big training takes longer to save.
            let_save(self._logs.folders, self._watch.received)
        super()._shutdown(death_sig, *args, **kwargs)

    def _accept_silent_ends(self) -> None:
        """Take a rank for done that ended well without handing over a result, as os._exit(0) does: torch waits for it
        for ever.
        """
        context = self._pcontext
        if not isinstance(context, MultiprocessContext) or context._pc is None:
            return
        for rank, process in enumerate(context._pc.processes):
            if process.exitcode == 0 and rank not in context._return_values and context._ret_vals[rank].empty():
                context._return_values[rank] = None

    def _monitor_workers(self, worker_group: Any) -> Any:
        self._accept_silent_ends()
        result = super()._monitor_workers(worker_group)
        if self._watch.forwarded is not None and saved_by_all(self._logs.folders) is not None:
            # The whole machine is about to go, not one rank of it.
            self._remaining_restarts = 0
        ends = self._ends()
        if result.state in (WorkerState.UNHEALTHY, WorkerState.FAILED):
            self.last_failure = result
            if self._remaining_restarts > 0 and ends is not None and ends.is_any():
                # A machine that has ended starts nothing again.
                self._remaining_restarts = 0
        elif result.state is WorkerState.HEALTHY and ends is not None and (elsewhere := ends.failed()) is not None:
            self.failed_elsewhere = [elsewhere]
            ends.post(ENDED)
            self._remaining_restarts = 0
            return RunResult(state=WorkerState.FAILED)
        return result

    def _exit_barrier(self) -> None:
        # torch's own barrier is one call into the store: deaf to signals, and it waits its five minutes out for an
        # agent that failed.
        ends = self._ends()
        if ends is not None:
            ends.post(SUCCEEDED)
            self.failed_elsewhere = ends.wait()

    def _ends(self) -> Ends | None:
        """How the other machines ended; None before they have met, and on a single machine."""
        group = self.get_worker_group()
        handler = group.spec.rdzv_handler
        store = handler.ends if isinstance(handler, RoundsRendezvous) else group.store
        if store is None or (group.group_world_size or 1) == 1:
            return None
        return Ends(store, int(group.group_rank or 0), int(group.group_world_size or 1))

    def post_failure(self) -> None:
        """Tell the agents of the other machines that the processes of this one failed, or were told to end."""
        ends = self._ends()
        if ends is None or self.failed_elsewhere:
            return
        # Where ranks save when told to end, those of the other machines are saving too, and end by themselves.
        ends.post(ENDED if notes(self._logs.folders) else FAILED)
        ends.let_others_know(self.get_worker_group().spec.monitor_interval)


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

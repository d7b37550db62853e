"""torch's elastic agent with known log directories, reliable signals, and an exit barrier that ends on failures."""

from __future__ import annotations

import contextlib
import logging
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest, Std

from accel_state.errors import ConfigurationError
from accel_state.preemption import Note

from .._torch_compat import AgentHooks, complete_tail_log, detach_stores
from .exit_barrier import ENDED, EXIT_BARRIER_SECONDS, FAILED, SUCCEEDED, ExitBarrier, farewell_seconds
from .preemption import grace_seconds, notes, save_and_wait, saved_by_all
from .signals import SignalWatch
from .static_rendezvous import StaticRendezvous

_AGENT_LOGS = ("torch.distributed.elastic", "torch.multiprocessing.spawn")


class LogDirectories(DefaultLogsSpecs):
    """torch's log directories; remembers the one of each local rank."""

    def __init__(self, log_dir: str, tee: Std | dict[int, Std], on_restart: Callable[[int, Note | None], None]) -> None:
        super().__init__(log_dir=log_dir, tee=tee)
        self._on_restart = on_restart
        self.by_rank: dict[int, Path] = {}

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Create the directories of one start."""
        if self.by_rank:
            restart = int(envs[0].get("TORCHELASTIC_RESTART_COUNT", "0"))
            self._on_restart(restart, saved_by_all(self.by_rank))
        destination = super().reify(envs)
        self.by_rank = {local_rank: Path(file).parent for local_rank, file in destination.error_files.items()}
        return destination


class Agent(AgentHooks):
    """The agent of this machine."""

    def __init__(
        self,
        spec: WorkerSpec,
        logs: LogDirectories,
        watch: SignalWatch,
        start_method: str,
        line_prefix: str | None,
        may_shrink: bool = False,
    ) -> None:
        super().__init__(
            spec,
            logs,
            start_method=start_method,
            exit_barrier_timeout=EXIT_BARRIER_SECONDS,
            log_line_prefix_template=line_prefix,
        )
        self._logs, self._watch, self._forks = logs, watch, start_method == "fork"
        self._may_shrink = may_shrink
        watch.ranks = self.pids
        watch.grace = lambda number: grace_seconds(logs.by_rank, number)
        watch.farewell = lambda: farewell_seconds(spec.monitor_interval) if self._barrier() is not None else 0.0
        self.failed_machines: list[int] = []
        """Ranks of machines that failed while the processes of this one did not."""
        self.last_failure: RunResult | None = None
        """The latest failure of this machine's processes."""
        self.succeeded: list[int] = []
        """Ranks of this machine that had ended without an error when the processes were last checked."""

    def start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        """Start the ranks."""
        commands = isinstance(worker_group.spec.entrypoint, str)
        try:
            with self._watch.starting_ranks(commands, self._forks), complete_tail_log():
                pids = super().start_workers(worker_group)
                for worker in worker_group.workers:
                    worker.id = pids[worker.local_rank]
        except OSError as error:
            file = f" ({error.filename})" if error.filename else ""
            raise ConfigurationError(
                f"the {worker_group.spec.local_world_size} processes of this machine cannot be started: "
                f"{error.strerror}{file}. Those that were started have been ended. Start fewer with --num_processes, "
                "or raise the limits of this shell (ulimit -n, ulimit -u)."
            ) from None
        return pids

    def pids(self) -> list[int]:
        """Process ids of the ranks of this machine."""
        return [worker.id for worker in self.get_worker_group().workers if isinstance(worker.id, int) and worker.id > 0]

    def meet(self, worker_group: WorkerGroup) -> None:
        """Join the rendezvous; ranks that are started again get a new store."""
        handler = worker_group.spec.rdzv_handler
        if isinstance(handler, StaticRendezvous):
            super().meet(worker_group)
            # A failure counts as one restart, even if it makes several machines fail.
            self.remaining_restarts = worker_group.spec.max_restarts - handler.round
            return
        # Kept until all machines have met again: ranks that still run on other machines would fail without it.
        former = detach_stores(handler)
        super().meet(worker_group)
        del former

    def end_workers(self, death_sig: signal.Signals, *args: Any, **kwargs: Any) -> None:
        """End the ranks, after those that save on the signal have had the time they asked for."""
        if self._watch.received is not None:
            save_and_wait(self._logs.by_rank, self._watch.received)
        super().end_workers(death_sig, *args, **kwargs)

    def monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Check the ranks of this machine, and whether another machine has failed."""
        self.accept_silent_exits()
        # Looked at before torch, which ends the other ranks as soon as it sees that one has failed.
        self.succeeded = [worker_group.workers[rank].global_rank for rank in self.succeeded_ranks()]
        result = super().monitor_workers(worker_group)
        if self._watch.forwarded is not None and saved_by_all(self._logs.by_rank) is not None:
            # The launcher was signalled, not a single rank: this machine is about to go away.
            self.remaining_restarts = 0
        barrier = self._barrier()
        if result.state in (WorkerState.UNHEALTHY, WorkerState.FAILED):
            self.last_failure = result
            if self.remaining_restarts > 0 and barrier is not None and self._ends_run(barrier):
                # A machine that has ended cannot take part in a restart.
                self.remaining_restarts = 0
        elif result.state is WorkerState.HEALTHY and barrier is not None:
            failed = barrier.first_failed()
            if failed is not None and self._may_shrink:
                return RunResult(state=WorkerState.UNHEALTHY)  # those that are left start again
            if failed is not None:
                self.failed_machines = [failed]
                barrier.post(ENDED)
                self.remaining_restarts = 0
                return RunResult(state=WorkerState.FAILED)
        return result

    def _ends_run(self, barrier: ExitBarrier) -> bool:
        """Whether a machine has ended without which the others cannot start again."""
        return not self._may_shrink and barrier.any_ended()

    def exit_barrier(self) -> None:
        """Wait for the other machines. torch's barrier ignores signals, and waits 5 minutes for a failed agent."""
        barrier = self._barrier()
        if barrier is not None:
            barrier.post(SUCCEEDED)
            self.failed_machines = barrier.wait()

    def _barrier(self) -> ExitBarrier | None:
        """The exit barrier; None before the machines have met, and on a single machine."""
        group = self.get_worker_group()
        handler = group.spec.rdzv_handler
        store = handler.store if isinstance(handler, StaticRendezvous) else group.store
        if store is None or (group.group_world_size or 1) == 1:
            return None
        return ExitBarrier(store, int(group.group_rank or 0), int(group.group_world_size or 1))

    def post_failure(self) -> None:
        """Tell the other machines that the processes of this one failed, or were ended by a signal."""
        barrier = self._barrier()
        if barrier is None or self.failed_machines:
            return
        # Ranks that save on the signal do so on the other machines too, and end by themselves.
        barrier.post(ENDED if notes(self._logs.by_rank) else FAILED)
        barrier.wait_until_noticed(self.get_worker_group().spec.monitor_interval)


def parse_tee(text: str) -> Std | dict[int, Std]:
    """``--tee`` as torch takes it."""
    if ":" not in text:
        return Std(int(text))
    return {int(rank): Std(int(streams)) for rank, _, streams in (entry.partition(":") for entry in text.split(","))}


@contextlib.contextmanager
def quiet_torch_logs() -> Iterator[None]:
    """Silence the agent's log: the launcher reports failures itself."""
    names = [name for name in logging.root.manager.loggerDict if name.startswith(_AGENT_LOGS)]
    levels = {logger: logger.level for logger in map(logging.getLogger, {*names, *_AGENT_LOGS})}
    for logger in levels:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)

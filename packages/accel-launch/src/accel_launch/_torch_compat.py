"""The private names of torch that this package uses; tests/test_torch_compat.py fails when torch drops one."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from torch.distributed.elastic import multiprocessing as torch_multiprocessing
from torch.distributed.elastic.agent.server import RunResult, WorkerGroup
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.events import Event, EventSource
from torch.distributed.elastic.multiprocessing import MultiprocessContext, SubprocessContext
from torch.distributed.elastic.multiprocessing import api as torch_processes
from torch.distributed.elastic.multiprocessing.tail_log import TailLog
from torch.distributed.elastic.rendezvous import RendezvousHandler

# What torch's rendezvous handlers keep over a restart; without them a new round gets a new store.
_HANDLER_STORE = ("_shared_tcp_store_server", "_bootstrap_store_info")


class AgentHooks(LocalElasticAgent):
    """torch's agent with its private hooks under public names, to override."""

    # torch's agent has no public extension points; torch.distributed.elastic.control_plane may become one.

    def start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        """Start the ranks of this machine, and return their processes by local rank."""
        return super()._start_workers(worker_group)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        return self.start_workers(worker_group)

    def monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Check the ranks of this machine; called every ``monitor_interval`` seconds."""
        return super()._monitor_workers(worker_group)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        return self.monitor_workers(worker_group)

    def meet(self, worker_group: WorkerGroup) -> None:
        """Join the rendezvous, and assign ranks."""
        super()._rendezvous(worker_group)

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        self.meet(worker_group)

    def end_workers(self, death_sig: signal.Signals, *args: Any, **kwargs: Any) -> None:
        """End the ranks of this machine, and kill those that have not ended after 30 s."""
        super()._shutdown(death_sig, *args, **kwargs)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, *args: Any, **kwargs: Any) -> None:
        self.end_workers(death_sig, *args, **kwargs)

    def exit_barrier(self) -> None:
        """Wait until the ranks of all machines have ended."""
        super()._exit_barrier()

    def _exit_barrier(self) -> None:
        self.exit_barrier()

    def _construct_event(self, state: str, source: EventSource, *args: Any, **kwargs: Any) -> Event:
        # torch's events contain this host's full name. An unresponsive name server would delay every event, and only an
        # installed handler reads them.
        return Event(f"torchelastic.worker.status.{state}", source)

    @property
    def remaining_restarts(self) -> int:
        """Restarts that are still allowed."""
        return self._remaining_restarts

    @remaining_restarts.setter
    def remaining_restarts(self, count: int) -> None:
        self._remaining_restarts = count

    def accept_silent_exits(self) -> None:
        """Treat a rank that exited with 0 without a result, as by os._exit(0), as done: torch would wait for ever."""
        context = self._pcontext
        if not isinstance(context, MultiprocessContext) or context._pc is None:
            return
        for rank, process in enumerate(context._pc.processes):
            if process.exitcode == 0 and rank not in context._return_values and context._ret_vals[rank].empty():
                context._return_values[rank] = None

    def succeeded_ranks(self) -> list[int]:
        """Local ranks whose command or function has ended without an error."""
        context = self._pcontext
        if isinstance(context, SubprocessContext):
            return [rank for rank, handler in context.subprocess_handlers.items() if handler.proc.poll() == 0]
        return list(context._return_values) if isinstance(context, MultiprocessContext) else []


def detach_stores(handler: RendezvousHandler) -> list[object]:
    """Make one of torch's rendezvous handlers forget the store of the ranks, and return what must stay alive of it.

    Otherwise a restart reuses it: gloo reads the addresses of ranks that have ended.
    """
    names = [name for name in _HANDLER_STORE if hasattr(handler, name)]
    stores = [getattr(handler, name) for name in names]
    for name in names:
        setattr(handler, name, None)
    return stores


@contextlib.contextmanager
def signal_handler(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Replace the signal handler that torch's agent installs when it starts processes."""
    name = "_terminate_process_handler"
    original = getattr(torch_processes, name, None)
    setattr(torch_processes, name, handler)
    try:
        yield
    finally:
        setattr(torch_processes, name, original)


@contextlib.contextmanager
def separate_starts(
    before: Callable[[], None], one_start: Callable[[], contextlib.AbstractContextManager[None]]
) -> Iterator[None]:
    """Let an exception between the starts of two ranks that run a command end the ranks that have been started.

    Args:
        before: called before the first start.
        one_start: makes a context for each start.
    """
    original = torch_processes.get_subprocess_handler

    class Context(SubprocessContext):
        def _start(self) -> None:
            started: dict[int, Any] = {}

            def start(*args: Any, **kwargs: Any) -> Any:
                with one_start():
                    handler = original(*args, **kwargs)
                    started[handler.local_rank_id] = handler
                return handler

            before()
            torch_processes.get_subprocess_handler = start
            try:
                super()._start()
            except BaseException:
                self.subprocess_handlers = started  # torch closes these
                raise
            finally:
                torch_processes.get_subprocess_handler = original

    torch_multiprocessing.SubprocessContext = Context  # type: ignore[misc]
    try:
        yield
    finally:
        torch_multiprocessing.SubprocessContext = SubprocessContext  # type: ignore[misc]


class _FinishedEvent(threading.Event):
    """Reports that a rank has ended at the second look, so that its file is read once more in between."""

    def __init__(self) -> None:
        super().__init__()
        self._was_set = False

    def is_set(self) -> bool:
        was_set, self._was_set = self._was_set, super().is_set()
        return was_set


class CompleteTailLog(TailLog):
    """Copies the output of ranks to the screen up to its last line.

    torch's thread stops when it has reached the end of a rank's file and then finds that the rank has ended; it loses
    what the rank wrote in between.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._finished_events = {local_rank: _FinishedEvent() for local_rank in self._finished_events}


@contextlib.contextmanager
def complete_tail_log() -> Iterator[None]:
    """Have torch's agent use :class:`CompleteTailLog`."""
    torch_processes.TailLog = CompleteTailLog  # type: ignore[misc]
    try:
        yield
    finally:
        torch_processes.TailLog = TailLog  # type: ignore[misc]

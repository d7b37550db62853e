"""This replica's membership in the run: torchft's quorum before each step, and its vote after it."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore

from accel_state import env, get_logger
from accel_state.collectives.single import Collectives
from accel_state.errors import ConfigurationError, require
from accel_state.options import CoreOptions, FaultToleranceOptions

logger = get_logger(__name__)

LIGHTHOUSE = "TORCHFT_LIGHTHOUSE"
"""The address of torchft's lighthouse, which the launcher sets for torchft and for accel."""
REPLICA = "ACCELERATE_FT_REPLICA"
"""The number of this replica, from 0."""
RESTARTS = "ACCELERATE_FT_RESTARTS"
"""How often the launcher has restarted this replica."""
HOST = "ACCELERATE_FT_HOST"
"""The address under which other machines reach this replica; unset if all are on one."""
DIRECTORY = "ACCELERATE_FT_DIRECTORY"
"""Where replicas report their progress to the launcher."""

# torchft retries a quorum that fails as long as the lighthouse is away; a step never ends for that reason alone.
_QUORUM_RETRIES = 1_000_000
_LONG = timedelta(days=7)
# Calls within this process, and the state of another one, may take longer than the wait for a replica that hangs.
_SHORTEST = timedelta(seconds=10)
_REPORT_BYTES = 40


def check_environment() -> None:
    """Raise an error unless a launcher has started this replica, and torchft is installed."""
    if env.read_str(LIGHTHOUSE) is None:
        raise ConfigurationError(
            f"strategy 'ft' needs torchft's lighthouse, whose address is in {LIGHTHOUSE}. Start the script with "
            "`accel launch --ft --num_replicas N`."
        )
    require("torchft", purpose="strategy 'ft'", install="accel[ft]")


def _transport(timeout: timedelta, host: str) -> Any:
    """What sends the state to a replica that joins, without a line on stderr for each request."""
    checkpointing = require("torchft.checkpointing", purpose="strategy 'ft'", install="accel[ft]")
    # torch says of every tensor that it loads from a stream that its buffer must not be written to; it is copied.
    warnings.filterwarnings("ignore", message="The given buffer is not writable", category=UserWarning)
    transport: Any = checkpointing.HTTPTransport(timeout=timeout, num_chunks=0)
    # torchft names the address by this host's name, which others may not know.
    address = transport.metadata().replace(f"//{socket.gethostname()}:", f"//{host}:", 1)
    transport.metadata = lambda: address
    handler = getattr(getattr(transport, "_server", None), "RequestHandlerClass", None)
    if handler is not None:
        handler.log_message = lambda *_: None
    return transport


class ReplicaGroup:
    """Joins the replicas of a run, and agrees with them on every step.

    Args:
        settings: time limits and numbers of replicas.
        backend: the collective library of this device ("nccl").
        processes: collectives over the processes of this replica.
        state: returns the state that a replica needs which has fallen behind.
        load: loads such a state of another replica.
    """

    def __init__(
        self,
        settings: FaultToleranceOptions,
        backend: str,
        processes: Collectives,
        state: Callable[[], Any],
        load: Callable[[Any], None],
    ) -> None:
        torchft = require("torchft", purpose="strategy 'ft'", install="accel[ft]")
        self.number = int(env.read_str(REPLICA) or 0)
        directory = env.read_str(DIRECTORY)
        self._processes = processes
        self._progress = None if directory is None or processes.rank else Path(directory) / f"replica_{self.number}"
        self._progress_file: int | None = None
        self._limit = timedelta(seconds=settings.replica_timeout)
        # What torchft says of a failed step is said by the launcher, in one line.
        logging.getLogger("torchft").setLevel(logging.INFO if CoreOptions.read("debug") else logging.CRITICAL)
        # torchft names its groups by the collective library; gloo serves devices whose library it does not know.
        kind = getattr(torchft, f"ProcessGroup{backend.upper()}", torchft.ProcessGroupGloo)
        self.pg: Any = kind(timeout=self._limit)
        host = env.read_str(HOST) or "localhost"
        if processes.world_size == 1:
            self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
            port = self._store.port
        else:
            port = int(env.read_str("MASTER_PORT") or 0)  # of the store through which the processes have met
        self.manager: Any = torchft.Manager(
            pg=self.pg,
            load_state_dict=load,
            state_dict=state,
            min_replica_size=settings.min_replicas,
            use_async_quorum=False,  # the quorum decides who computes what, so it comes first
            timeout=max(self._limit, _SHORTEST),
            quorum_timeout=_LONG,
            connect_timeout=max(self._limit, _SHORTEST),
            rank=processes.rank,
            world_size=processes.world_size,
            store_addr=host,
            store_port=port,
            lighthouse_addr=env.read_str(LIGHTHOUSE),
            replica_id=f"accel_{self.number}",
            hostname=host,
            heartbeat_interval=timedelta(seconds=min(0.1, settings.heartbeat_timeout / 5)),
            checkpoint_transport=_transport(max(self._limit, _SHORTEST), host),
            quorum_retries=_QUORUM_RETRIES,
        )
        self.rank, self.size = 0, 1

    def begin_step(self, step: int) -> None:
        """Wait for the replicas of the next step, and take over the state of one that is ahead.

        Args:
            step: committed steps of this replica.
        """
        manager = self.manager
        if manager.current_step() != step:  # a checkpoint was loaded
            manager.load_state_dict({"step": step, "batches_committed": 0})
        self._report("waits", step)
        while True:
            manager.start_quorum()
            error = manager.errored()
            if error is None and self._is_behind():
                error = RuntimeError("a replica that is ahead is not in the quorum")
            joined = torch.tensor(float(error is None))
            if self._processes.all_reduce(joined, "min").item():
                break
            self.fail(error or RuntimeError("another process of this replica could not join"))
            manager.should_commit()
            time.sleep(0.1)
        self.rank, self.size = int(manager.participating_rank()), int(manager.num_participants())
        self._report("computes", manager.current_step())

    def _is_behind(self) -> bool:
        """Whether a live replica of this machine is ahead of the quorum, and so is not in it.

        Replicas that were restarted could otherwise begin a run of their own while the others compute a step. The
        launcher removes the reports of the dead.
        """
        if self._progress is None:
            return False
        for file in self._progress.parent.glob("replica_*"):
            with contextlib.suppress(FileNotFoundError):
                state, _, reached = file.read_text(encoding="utf-8").partition(" ")
                if state in ("waits", "computes") and int(reached) > self.manager.current_step():
                    return True
        return False

    def fail(self, error: Exception) -> None:
        """Abandon the step in progress: its vote will be no, and the others notice that this replica left."""
        self.manager.report_error(error)
        self._leave_group(error)

    def _leave_group(self, error: Any) -> None:
        logger.info("replica %d: the step is abandoned: %s", self.number, error)
        self.pg.abort()

    def vote(self) -> bool:
        """Whether the step in progress is committed; it is if no collective of this replica has failed."""
        return bool(self.manager.should_commit())

    def _report(self, state: str, step: int) -> None:
        """Tell the launcher what this replica does: it waits for others, or computes."""
        if self._progress is None:
            return
        if self._progress_file is None:
            self._progress_file = os.open(self._progress, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        # Overwritten in place, twice a step: file systems flush files that are truncated and written again.
        os.pwrite(self._progress_file, f"{state} {step}".ljust(_REPORT_BYTES).encode(), 0)

    def finish(self) -> None:
        """Tell the launcher that the training of the run has ended."""
        self._report("finished", self.manager.current_step())

    def close(self) -> None:
        """Leave the run."""
        self.manager.shutdown(wait=False)
        self.pg.abort()
        if self._progress_file is not None:
            os.close(self._progress_file)
            self._progress_file = None

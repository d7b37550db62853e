"""This replica's membership in the run: torchft's quorum before each step, and its vote after it."""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

import torch

from accel_state import env, get_logger, run_token
from accel_state.collectives.single import Collectives
from accel_state.errors import ConfigurationError
from accel_state.options import CoreOptions, FaultToleranceOptions
from accel_state.ports import LOOPBACK
from accel_state.tcp_store import serve_store
from accel_state.torchft_version import torchft_version

from .._torch_compat import forget_quorum, managers_that_listen_at
from .lighthouse_watch import LighthouseWatch
from .network import Network
from .transport import StateTransport

logger: Final = get_logger(__name__)

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

# torchft retries a quorum that fails as long as the lighthouse is away; a step never ends for that reason alone. It
# divides the time by the retries, and waits at least 0.1 s.
_QUORUM_RETRIES = 10_000_000
_LONG = timedelta(days=7)
# How long the replicas of other machines, of which nothing is known here, may take to reach a new lighthouse.
_RETURN_SECONDS = 3.0
# Calls within this process, and the state of another one, may take longer than the wait for a replica that hangs.
_SHORTEST = timedelta(seconds=10)
_REPORT_BYTES = 40
# How long a call into a store may take: torch's own value.
_STORE_TIMEOUT = timedelta(minutes=5)


def check_environment() -> None:
    """Raise an error unless a launcher has started this replica, and torchft is installed."""
    if env.read_str(LIGHTHOUSE) is None:
        raise ConfigurationError(
            f"strategy 'ft' needs torchft's lighthouse, whose address is in {LIGHTHOUSE}. Start the script with "
            "`accel launch --ft --num_replicas N`."
        )
    torchft_version("strategy 'ft'")


class _FreshKeys:
    """Has torchft set up a group with keys of its store that have not been used.

    torchft names the keys by the number of the quorum, but a lighthouse that was restarted counts from 1 again, and the
    addresses of former groups are still there. So the process whose store it is gives the names a ticket. It takes the
    ticket back before it asks for another quorum, so that no replica finds it there later.

    Each member of the group proves that it has the token of the run, with a signature in the store: the lighthouse
    gives a place in the quorum to every process that asks for one.

    Args:
        pg: torchft's process group.
        network: how this process reaches the stores of others.
        address: host and port of the store of this replica, as others reach it.
        timeout: how long to wait for a ticket.
    """

    def __init__(self, pg: Any, network: Network, address: str, timeout: timedelta) -> None:
        self._network, self._address, self._timeout = network, address, timeout
        self._configure = pg.configure
        process_group: Any = importlib.import_module("torchft.process_group")
        self._connect = process_group.create_store_client
        self._issued: tuple[Any, str] | None = None
        pg.configure = self.configure

    def configure(self, store_addr: str, replica_id: str, rank: int, world_size: int, *arguments: Any) -> None:
        """Run by torchft's manager when the quorum has changed."""
        address, _, name = store_addr.partition("/")
        reached = self._network.reach("store", address)
        store = self._connect(f"{reached}/accel/ticket", timeout=self._timeout)
        if address == self._address:
            store.set(name, uuid4().hex)
            self._issued = store, name
        ticket = store.get(name).decode()
        self._prove(store, f"{name}/{ticket}", store_addr, rank, world_size)
        self._configure(f"{reached}/{name}/{ticket}", replica_id, rank, world_size, *arguments)

    def _prove(self, store: Any, key: str, store_addr: str, rank: int, world_size: int) -> None:
        """Sign the place of this process in the group, and check the signatures of the others."""
        token = self._network.token
        store.set(f"{key}/{rank}", run_token.sign(token, "member", store_addr, key, rank).hex())
        for other in range(world_size):
            try:
                signature = bytes.fromhex(store.get(f"{key}/{other}").decode())
            except ValueError:
                signature = b""
            if not run_token.is_signed(signature, token, "member", store_addr, key, other):
                raise run_token.TokenError(f"member {other} of {world_size} does not have the token of this run")

    def take_back(self) -> None:
        """Run before each quorum."""
        if self._issued is not None:
            store, name = self._issued
            store.delete_key(name)
            self._issued = None


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
        torchft: Any = importlib.import_module("torchft")
        self.number: int = int(env.read_str(REPLICA) or 0)
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
        self._is_on_one_machine = env.read_str(HOST) is None
        self._network = Network(env.read_str(HOST), run_token.read_token())
        patience = max(self._limit, _SHORTEST)
        if processes.world_size == 1:
            port = self._network.port()
            self._store = serve_store(LOOPBACK, port, _STORE_TIMEOUT)
            port = int(self._store.port)
        else:
            port = int(env.read_str("MASTER_PORT") or 0)  # of the store through which the processes have met
        manager_port = self._network.port()
        if processes.rank == 0:
            self._network.open(port, manager_port)
        host = self._network.host
        address = f"{host}:{port}"
        self._keys = _FreshKeys(self.pg, self._network, address, self._limit)
        reach = functools.partial(self._network.reach, "manager")
        with managers_that_listen_at(f"{LOOPBACK}:{manager_port}", address, reach):
            self.manager: Any = torchft.Manager(
                pg=self.pg,
                load_state_dict=load,
                state_dict=state,
                min_replica_size=settings.min_replicas,
                use_async_quorum=False,  # the quorum decides who computes what, so it comes first
                timeout=patience,
                quorum_timeout=_LONG,
                connect_timeout=patience,
                rank=processes.rank,
                world_size=processes.world_size,
                store_addr=LOOPBACK,
                store_port=port,
                lighthouse_addr=env.read_str(LIGHTHOUSE),
                replica_id=f"accel_{self.number}",
                hostname=f"[{host}]" if ":" in host else host,  # part of a URL
                heartbeat_interval=timedelta(seconds=min(0.1, settings.heartbeat_timeout / 5)),
                checkpoint_transport=StateTransport(host, self._network.token, patience),
                quorum_retries=_QUORUM_RETRIES,
            )
        self.rank: int = 0
        self.size: int = 1
        self._lighthouse_ended = False
        self._is_current = False  # whether it has committed the latest step
        self._has_joined = False  # whether it has taken part in a step
        self._watch = LighthouseWatch(env.read_str(LIGHTHOUSE) or "", self._on_lighthouse_end)

    def _on_lighthouse_end(self) -> None:
        """Forget the number of the quorum: the next lighthouse counts from 1 again."""
        self._lighthouse_ended = True
        forget_quorum(self.manager)

    def begin_step(self, step: int) -> None:
        """Wait for the replicas of the next step, and take over the state of one that is ahead.

        Args:
            step: committed steps of this replica.
        """
        manager = self.manager
        if manager.current_step() != step:  # a checkpoint was loaded
            manager.load_state_dict({"step": step, "batches_committed": 0})
        self._report("waits" if self._has_joined else "joins", step)
        began: float | None = None
        while True:
            self._keys.take_back()
            self._watch.check()
            manager.start_quorum()
            began = began or time.monotonic()
            error = manager.errored()
            if error is None:
                error = self._missing(time.monotonic() - began)
            joined = torch.tensor(float(error is None))
            if self._processes.all_reduce(joined, "min").item():
                break
            self.fail(error or RuntimeError("another process of this replica could not join"))
            manager.should_commit()
            time.sleep(0.1)
        self._lighthouse_ended = False
        self._watch.begin()
        self.rank, self.size = int(manager.participating_rank()), int(manager.num_participants())
        self._has_joined = True
        self._report("computes", manager.current_step())

    def _missing(self, seconds: float) -> Exception | None:
        """Return which live replica is not in the quorum, so that the others must wait for it.

        Replicas that were restarted could otherwise begin a run of their own while the others compute a step. And the
        first replica that reaches a new lighthouse, which knows of no other, could run ahead of the others.

        Args:
            seconds: time since the first quorum.
        """
        if self._is_current and not self._lighthouse_ended:
            return None  # reading the reports would take time in every step
        step = self.manager.current_step()
        reached = list(self._live())
        if any(other > step for other in reached):
            return RuntimeError("a replica that is ahead is not in the quorum")
        if not self._lighthouse_ended:
            return None
        size = self.manager.num_participants()
        may_return = not self._is_on_one_machine and size < self.size and seconds < _RETURN_SECONDS
        if may_return or sum(other >= step - 1 for other in reached) > size:
            return RuntimeError("a replica has not reached the new lighthouse yet")
        return None

    def _live(self) -> Iterator[int]:
        """Yield the steps of the live replicas that train, by their reports; those on other machines are a second old.

        The launcher removes the reports of the dead.
        """
        if self._progress is None:
            return
        for file in self._progress.parent.glob("replica_*"):
            with contextlib.suppress(FileNotFoundError):
                state, _, reached = file.read_text(encoding="utf-8").partition(" ")
                if state in ("joins", "waits", "computes"):
                    yield int(reached)

    def fail(self, error: Exception) -> None:
        """Abandon the step in progress: its vote will be no, and the others notice that this replica left."""
        self.manager.report_error(error)
        logger.info("replica %d: the step is abandoned: %s", self.number, error)
        self.pg.abort()

    def vote(self) -> bool:
        """Return True if the step in progress is committed; it is if no collective of this replica has failed."""
        self._is_current = bool(self.manager.should_commit())
        return self._is_current

    def _report(self, state: str, step: int) -> None:
        """Tell the launcher what this replica does: it joins the others, waits for them, or computes."""
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
        self._watch.close()
        self.manager.shutdown(wait=False)
        self.pg.abort()
        self._network.close()
        if self._progress_file is not None:
            os.close(self._progress_file)
            self._progress_file = None

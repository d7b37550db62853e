"""The rendezvous of a launch, in terms of torch."""

from __future__ import annotations

import math
import uuid
from typing import Any

from torch.distributed.elastic.rendezvous import RendezvousParameters

from accel_state.options import RendezvousOptions
from accel_state.options.resources import MachineRange
from accel_state.ports import LOOPBACK, is_loopback

from ..network.interfaces import own_address
from ..network.waiting import rendezvous_settings, timeout_seconds
from ..ports import DEFAULT_PORT
from .agent import ElasticJob
from .meeting import Meetings
from .ranged_rendezvous import RangedRendezvous, RangeSettings, check_last_call
from .static_rendezvous import StaticRendezvous
from .torch_rendezvous import TorchRendezvous

# How long a start waits for more machines, after one has arrived.
_LAST_CALL_SECONDS = 5


def make_parameters(options: RendezvousOptions, num_machines: int, run_id: str | None = None) -> RendezvousParameters:
    """The parameters of a rendezvous. On one machine the port is 0 by default, so that the agent takes a free one."""
    alone = num_machines == 1
    host = options.main_process_ip if options.main_process_ip and not alone else LOOPBACK
    port = options.main_process_port or (0 if alone else DEFAULT_PORT)
    settings = rendezvous_settings(options.rdzv_conf)
    return RendezvousParameters(
        backend="static" if alone else options.rdzv_backend,
        endpoint=f"[{host}]:{port}" if ":" in host else f"{host}:{port}",
        run_id=run_id or (uuid.uuid4().hex if alone else "none"),  # several machines need the same id
        min_nodes=num_machines.minimum if isinstance(num_machines, MachineRange) else num_machines,
        max_nodes=num_machines,
        local_addr=LOOPBACK if alone else _reachable_address(host),
        # What c10d calls it, in whole seconds.
        **{"join_timeout": str(math.ceil(timeout_seconds(options.rdzv_conf))), **settings},
    )


def _reachable_address(main: str) -> str | None:
    """The address of this machine from which it reaches the main one; None for torch's choice, its host name.

    A machine whose own name or main address resolves to 127.0.1.1 has none that the name tells.
    """
    try:
        address = own_address(main)
    except OSError:
        return None  # no route now; the rendezvous says so
    return None if is_loopback(address) and not is_loopback(main) else address


def not_met(parameters: RendezvousParameters, reason: str) -> str:
    """The message for a rendezvous that failed."""
    low, high = parameters.min_nodes, parameters.max_nodes
    machines = high if low == high else f"{low} to {high}"
    return (
        f"the {machines} machines did not meet at {parameters.endpoint}: {reason}. Check that the launcher "
        "runs on every machine with the same --main_process_ip and --main_process_port, and that this machine can "
        "reach that port."
    )


def make_meetings(job: ElasticJob, parameters: RendezvousParameters) -> Meetings:
    """The meetings of a job."""
    host, _, number = parameters.endpoint.rpartition(":")
    host, port, options = host.strip("[]"), int(number), job.rendezvous
    timeout = timeout_seconds(options.rdzv_conf)
    common: dict[str, Any] = {
        "local_processes": job.local_processes,
        "facts": job.facts,
        "machine_timeout": options.machine_timeout,
        "forks": job.forks,
    }
    if isinstance(job.num_machines, MachineRange):
        last_call = check_last_call(str(parameters.config.get("last_call_timeout", _LAST_CALL_SECONDS)))
        settings = RangeSettings(
            host, port, job.num_machines, parameters.run_id, job.serves, timeout, last_call, options.max_restarts
        )
        return RangedRendezvous(settings, **common)
    if parameters.backend != "static":
        return TorchRendezvous(parameters, host, port, timeout, **common)
    machines, restarts = parameters.max_nodes, options.max_restarts
    return StaticRendezvous(host, port, options.machine_rank, machines, parameters.run_id, timeout, restarts, **common)

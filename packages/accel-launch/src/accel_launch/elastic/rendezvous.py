"""The rendezvous of a launch, in terms of torch."""

from __future__ import annotations

import uuid
from collections.abc import Mapping

from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters

from accel_state.errors import ConfigurationError
from accel_state.options import RendezvousOptions
from accel_state.options.resources import MachineRange
from accel_state.ports import LOOPBACK, is_loopback

from ..network.contact import say
from ..network.interfaces import own_address
from ..ports import DEFAULT_PORT, is_local, wait_for_server
from .agent import ElasticJob
from .static_rendezvous import StaticRendezvous

DEFAULT_TIMEOUT_SECONDS = 900


def make_parameters(options: RendezvousOptions, num_machines: int, run_id: str | None = None) -> RendezvousParameters:
    """The parameters of a rendezvous. On one machine the port is 0 by default, so that the agent takes a free one."""
    alone = num_machines == 1
    host = options.main_process_ip if options.main_process_ip and not alone else LOOPBACK
    port = options.main_process_port or (0 if alone else DEFAULT_PORT)
    return RendezvousParameters(
        backend="static" if alone else options.rdzv_backend,
        endpoint=f"[{host}]:{port}" if ":" in host else f"{host}:{port}",
        run_id=run_id or (uuid.uuid4().hex if alone else "none"),  # several machines need the same id
        min_nodes=num_machines.minimum if isinstance(num_machines, MachineRange) else num_machines,
        max_nodes=num_machines,
        local_addr=LOOPBACK if alone else _reachable_address(host),
        **{"timeout": DEFAULT_TIMEOUT_SECONDS, **parse_settings(options.rdzv_conf)},
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


def wait_for_main_machine(parameters: RendezvousParameters) -> None:
    """With torch's rendezvous, wait until the machine that holds its store listens, if it is another one.

    torch would wait in one long call that no signal interrupts.
    """
    if parameters.max_nodes == 1 or parameters.backend == "static":
        return
    host, port = _split(parameters.endpoint)
    remote = not is_local(host)
    seconds = _timeout_seconds(parameters)
    if remote and not wait_for_server(host, port, seconds, say):
        raise ConfigurationError(not_met(parameters, f"no server listened there for {seconds:g} s"))


def not_met(parameters: RendezvousParameters, reason: str) -> str:
    """The message for a rendezvous that failed."""
    low, high = parameters.min_nodes, parameters.max_nodes
    machines = high if low == high else f"{low} to {high}"
    return (
        f"the {machines} machines did not meet at {parameters.endpoint}: {reason}. Check that the launcher "
        "runs on every machine with the same --main_process_ip and --main_process_port, and that this machine can "
        "reach that port."
    )


def make_handler(job: ElasticJob, parameters: RendezvousParameters) -> RendezvousHandler:
    """The rendezvous handler of a job."""
    if parameters.backend == "static":
        return StaticRendezvous(
            *_split(parameters.endpoint),
            rank=job.rendezvous.machine_rank,
            world_size=parameters.max_nodes,
            run_id=parameters.run_id,
            timeout_seconds=_timeout_seconds(parameters),
            max_restarts=job.rendezvous.max_restarts,
            forks=job.forks,
            local_processes=job.local_processes,
            facts=job.facts,
            machine_timeout=job.rendezvous.machine_timeout,
        )
    from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

    return get_rendezvous_handler(parameters)


def _split(endpoint: str) -> tuple[str, int]:
    host, _, port = endpoint.rpartition(":")
    return host.strip("[]"), int(port)


def _timeout_seconds(parameters: RendezvousParameters) -> float:
    text = str(parameters.get("timeout"))
    try:
        return float(text)
    except ValueError:
        raise ConfigurationError(
            f"--rdzv_conf timeout={text} must be a number of seconds, such as timeout=600."
        ) from None


def parse_settings(text: str) -> Mapping[str, str]:
    """``timeout=600,join_timeout=300`` as a mapping."""
    entries = (entry.partition("=") for entry in text.split(",") if entry)
    return {key.strip(): value.strip() for key, _, value in entries}

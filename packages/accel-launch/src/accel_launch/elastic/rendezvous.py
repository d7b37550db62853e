"""Where the processes of a plan meet, in torch's terms."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Mapping

from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters

from accel_state.errors import ConfigurationError
from accel_state.options import RendezvousOptions

from ..ports import is_local, wait_for_server
from .checks import DEFAULT_PORT, LOOPBACK
from .static_rendezvous import RoundsRendezvous

DEFAULT_TIMEOUT_SECONDS = 900


def make_parameters(options: RendezvousOptions, num_machines: int, run_id: str | None = None) -> RendezvousParameters:
    """The rendezvous of a launch.

    On one machine nothing has to meet: without an asked-for port the agent takes a free one, with nothing in between
    that could take it.
    """
    host = options.main_process_ip or LOOPBACK
    if num_machines == 1:
        return _parameters("static", host, options.main_process_port or 0, uuid.uuid4().hex, 1, options)
    # Machines must agree on the id.
    return _parameters(
        options.rdzv_backend, host, options.main_process_port or DEFAULT_PORT, run_id or "none", num_machines, options
    )


def await_main_machine(options: RendezvousOptions, parameters: RendezvousParameters) -> None:
    """Wait until the machine that holds the store listens, where that is another one.

    torch would wait too, but in one long call that no signal interrupts, and with a page of C++ frames at its end.

    Raises:
        ConfigurationError: it does not listen within the time-out of the rendezvous.
    """
    if parameters.max_nodes == 1:
        return
    host, port = _split(parameters.endpoint)
    elsewhere = options.machine_rank > 0 if parameters.backend == "static" else not is_local(host)
    seconds = _timeout_seconds(parameters)
    if elsewhere and not wait_for_server(
        host, port, seconds, lambda text: print(f"accel launch: {text}", file=sys.stderr, flush=True)
    ):
        raise ConfigurationError(not_met(parameters, f"nobody listens there, for {seconds:g} s"))


def not_met(parameters: RendezvousParameters, reason: str) -> str:
    """The message for machines that did not find one another."""
    return (
        f"the {parameters.max_nodes} machines did not meet at {parameters.endpoint}: {reason}. Is the launcher "
        "started on every machine, "
        "with the same --main_process_ip and --main_process_port, and can this machine reach that port?"
    )


def make_handler(options: RendezvousOptions, parameters: RendezvousParameters, *, forks: bool) -> RendezvousHandler:
    """What brings the machines together.

    Args:
        forks: whether the processes of this machine are forked from this one.
    """
    if parameters.backend == "static":
        return RoundsRendezvous(
            *_split(parameters.endpoint),
            rank=options.machine_rank,
            world_size=parameters.max_nodes,
            run_id=parameters.run_id,
            timeout_seconds=_timeout_seconds(parameters),
            max_restarts=options.max_restarts,
            forks=forks,
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
        raise ConfigurationError(f"--rdzv_conf timeout={text}: not a number of seconds, as in timeout=600.") from None


def _parameters(
    backend: str, host: str, port: int, run_id: str, num_machines: int, options: RendezvousOptions
) -> RendezvousParameters:
    return RendezvousParameters(
        backend=backend,
        endpoint=f"[{host}]:{port}" if ":" in host else f"{host}:{port}",
        run_id=run_id,
        min_nodes=num_machines,
        max_nodes=num_machines,
        local_addr=LOOPBACK if num_machines == 1 else None,
        **{"timeout": DEFAULT_TIMEOUT_SECONDS, **parse_settings(options.rdzv_conf)},
    )


def parse_settings(text: str) -> Mapping[str, str]:
    """``timeout=600,join_timeout=300`` as a mapping."""
    return {
        key.strip(): value.strip() for key, _, value in (entry.partition("=") for entry in text.split(",") if entry)
    }

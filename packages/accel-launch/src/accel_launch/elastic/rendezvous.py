"""Where the processes of a plan meet, in torch's terms."""

from __future__ import annotations

import socket
import uuid
from collections.abc import Mapping
from typing import Any

from accel_state.errors import ConfigurationError
from accel_state.options import RendezvousOptions
from torch.distributed.elastic.rendezvous import RendezvousParameters

from ..ports import is_free

DEFAULT_PORT = 29500
DEFAULT_TIMEOUT_SECONDS = 900
LOOPBACK = "127.0.0.1"


def make_parameters(options: RendezvousOptions, num_machines: int, run_id: str | None = None) -> RendezvousParameters:
    """The rendezvous of a launch.

    On one machine without an asked-for port the agent itself picks a free one, with nothing in between that could take it.

    Raises:
        ConfigurationError: an asked-for port is in use, or the address of the main machine is not known.
    """
    if num_machines == 1 and not options.main_process_port:
        return _parameters("c10d", "localhost:0", uuid.uuid4().hex, 1, options, LOOPBACK)
    host = options.main_process_ip or LOOPBACK
    port = options.main_process_port or DEFAULT_PORT
    _check_host(host)
    if options.machine_rank == 0 and (num_machines == 1 or options.rdzv_backend == "static"):
        _check_port(port)
    # Machines must agree on the id; a single one takes a fresh id, so that it never joins somebody else's run.
    run_id = run_id or (uuid.uuid4().hex if num_machines == 1 else "none")
    endpoint = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    local_address = LOOPBACK if num_machines == 1 else None
    return _parameters(options.rdzv_backend, endpoint, run_id, num_machines, options, local_address)


def static_address(parameters: RendezvousParameters) -> tuple[str | None, int | None]:
    """Address and port of rank 0 that processes get; (None, None) where the rendezvous decides."""
    if parameters.backend != "static":
        return None, None
    host, _, port = parameters.endpoint.rpartition(":")
    return host.strip("[]"), int(port)


def _parameters(
    backend: str, endpoint: str, run_id: str, num_machines: int, options: RendezvousOptions, local_address: str | None
) -> RendezvousParameters:
    settings: dict[str, Any] = {"timeout": DEFAULT_TIMEOUT_SECONDS, **parse_settings(options.rdzv_conf)}
    if backend == "static":
        settings["rank"] = options.machine_rank
    return RendezvousParameters(
        backend=backend, endpoint=endpoint, run_id=run_id, min_nodes=num_machines, max_nodes=num_machines, local_addr=local_address, **settings
    )


def parse_settings(text: str) -> Mapping[str, str]:
    """``timeout=600,join_timeout=300`` as a mapping."""
    return {key.strip(): value.strip() for key, _, value in (entry.partition("=") for entry in text.split(",") if entry)}


def _check_host(host: str) -> None:
    try:
        socket.getaddrinfo(host, None)
    except (OSError, UnicodeError) as error:
        raise ConfigurationError(f"--main_process_ip {host!r} is not a known host: {error}. Give the IP address of the machine of rank 0.") from None


def _check_port(port: int) -> None:
    if not is_free(port):
        raise ConfigurationError(
            f"--main_process_port {port}: the port is in use on this machine, or not yours to use. Give another one; on a single machine, "
            "leave it out or give 0 for any free port."
        )

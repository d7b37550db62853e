"""Where the processes of a plan meet, in torch's terms."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Mapping
from typing import Any

from torch.distributed.elastic.rendezvous import RendezvousParameters

from accel_state.errors import ConfigurationError
from accel_state.options import RendezvousOptions

from ..ports import is_local, wait_for_server
from .checks import DEFAULT_PORT, LOOPBACK

DEFAULT_TIMEOUT_SECONDS = 900


def make_parameters(options: RendezvousOptions, num_machines: int, run_id: str | None = None) -> RendezvousParameters:
    """The rendezvous of a launch.

    On one machine without an asked-for port the agent itself picks a free one, with nothing in between that could take it.
    """
    if num_machines == 1 and not options.main_process_port:
        return _parameters("c10d", "localhost:0", uuid.uuid4().hex, 1, options, LOOPBACK)
    host = options.main_process_ip or LOOPBACK
    port = options.main_process_port or DEFAULT_PORT
    # Machines must agree on the id; a single one takes a fresh id, so that it never joins somebody else's run.
    run_id = run_id or (uuid.uuid4().hex if num_machines == 1 else "none")
    endpoint = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    local_address = LOOPBACK if num_machines == 1 else None
    return _parameters(options.rdzv_backend, endpoint, run_id, num_machines, options, local_address)


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
    seconds = float(parameters.get("timeout", DEFAULT_TIMEOUT_SECONDS))
    if elsewhere and not wait_for_server(host, port, seconds, lambda text: print(f"accel launch: {text}", file=sys.stderr, flush=True)):
        raise ConfigurationError(not_met(parameters, f"nobody listens there, for {seconds:g} s"))


def not_met(parameters: RendezvousParameters, reason: str) -> str:
    """The message for machines that did not find one another."""
    return (
        f"the {parameters.max_nodes} machines did not meet at {parameters.endpoint}: {reason}. Is the launcher started on every machine, "
        "with the same --main_process_ip and --main_process_port, and can this machine reach that port?"
    )


def static_address(parameters: RendezvousParameters) -> tuple[str | None, int | None]:
    """Address and port of rank 0 that processes get; (None, None) where the rendezvous decides."""
    if parameters.backend != "static":
        return None, None
    return _split(parameters.endpoint)


def _split(endpoint: str) -> tuple[str, int]:
    host, _, port = endpoint.rpartition(":")
    return host.strip("[]"), int(port)


def _parameters(
    backend: str, endpoint: str, run_id: str, num_machines: int, options: RendezvousOptions, local_address: str | None
) -> RendezvousParameters:
    settings: dict[str, Any] = {"timeout": DEFAULT_TIMEOUT_SECONDS, **parse_settings(options.rdzv_conf)}
    if backend == "static":
        settings["rank"] = options.machine_rank
    return RendezvousParameters(
        backend=backend,
        endpoint=endpoint,
        run_id=run_id,
        min_nodes=num_machines,
        max_nodes=num_machines,
        local_addr=local_address,
        **settings,
    )


def parse_settings(text: str) -> Mapping[str, str]:
    """``timeout=600,join_timeout=300`` as a mapping."""
    return {key.strip(): value.strip() for key, _, value in (entry.partition("=") for entry in text.split(",") if entry)}

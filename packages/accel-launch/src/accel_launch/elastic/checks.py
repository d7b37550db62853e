"""Checks of the rendezvous options before torch is imported and any process is started."""

from __future__ import annotations

import os
import socket

from accel_state.errors import ConfigurationError
from accel_state.options import RendezvousOptions
from accel_state.paths import as_path
from accel_state.ports import LOOPBACK

from ..ports import DEFAULT_PORT, is_free, listening_host


def check_rendezvous(options: RendezvousOptions, num_machines: int) -> None:
    """Check the main address and port, and create the log directory."""
    if num_machines > 1 or options.main_process_port:
        host, port = options.main_process_ip or LOOPBACK, options.main_process_port or DEFAULT_PORT
        try:
            socket.getaddrinfo(host, None)
        except (OSError, UnicodeError) as error:
            raise ConfigurationError(
                f"--main_process_ip {host!r} is not a known host: {error}. Give the address of the machine of rank 0."
            ) from None
        serves = options.machine_rank == 0 and (num_machines == 1 or options.rdzv_backend == "static")
        if serves and not is_free(port, LOOPBACK if num_machines == 1 else listening_host(host)):
            raise ConfigurationError(
                f"--main_process_port {port}: the port is in use on this machine, or reserved for the system. Give "
                "another one; on a single machine, leave it out, or give 0, for any free port."
            )
    if options.log_dir is not None:
        try:
            as_path("--log_dir", options.log_dir)
            os.makedirs(options.log_dir, exist_ok=True)
        except OSError as error:
            raise ConfigurationError(f"--log_dir {options.log_dir!r} cannot be created: {error.strerror}.") from None

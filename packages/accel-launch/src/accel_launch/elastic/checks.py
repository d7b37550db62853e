"""What can be seen to be wrong before anything is started, and before torch is imported."""

from __future__ import annotations

import os
import socket

from accel_state.errors import ConfigurationError
from accel_state.options import RendezvousOptions

from ..ports import is_free

DEFAULT_PORT = 29500
LOOPBACK = "127.0.0.1"


def check_rendezvous(options: RendezvousOptions, num_machines: int) -> None:
    """Check the address that was asked for, and make the log folder.

    Raises:
        ConfigurationError: the port is in use, the address of the main machine is not known, or the folder cannot be
            made.
    """
    if num_machines > 1 or options.main_process_port:
        _check_host(options.main_process_ip or LOOPBACK)
        if options.machine_rank == 0 and (num_machines == 1 or options.rdzv_backend == "static"):
            _check_port(options.main_process_port or DEFAULT_PORT)
    if options.log_dir is not None:
        _make_folder(options.log_dir)


def _make_folder(folder: str) -> None:
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"--log_dir {folder!r} cannot be made: {error.strerror}.") from None


def _check_host(host: str) -> None:
    try:
        socket.getaddrinfo(host, None)
    except (OSError, UnicodeError) as error:
        raise ConfigurationError(
            f"--main_process_ip {host!r} is not a known host: {error}. Give the IP address of the machine of rank 0."
        ) from None


def _check_port(port: int) -> None:
    if not is_free(port):
        raise ConfigurationError(
            f"--main_process_port {port}: the port is in use on this machine, or not yours to use. Give another one; "
            "on a single machine, "
            "leave it out or give 0 for any free port."
        )

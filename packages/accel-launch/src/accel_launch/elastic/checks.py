"""Checks of the rendezvous options before torch is imported and any process is started."""

from __future__ import annotations

import os
import socket
import time

from accel_state.env import read_str
from accel_state.errors import ConfigurationError
from accel_state.options.rendezvous import RendezvousOptions
from accel_state.options.resources import MachineRange
from accel_state.paths import as_path
from accel_state.ports import DEFAULT_PORT, LOOPBACK, is_free, listening_host

from ..launch_context import POD_INDEX
from ..network.board import say

# How long the name of another pod may take to resolve: its node may still load the image.
_NAME_SECONDS = 300.0
_LOOK_SECONDS = 1.0
_NOTE_SECONDS = 5.0


def check_rendezvous(options: RendezvousOptions, num_machines: int) -> None:
    """Check the main address and port, and create the log directory."""
    if num_machines > 1 or options.main_process_port:
        host, port = options.main_process_ip or LOOPBACK, options.main_process_port or DEFAULT_PORT
        if num_machines > 1 and read_str(POD_INDEX):
            _wait_for_name(host, _NAME_SECONDS)
        try:
            socket.getaddrinfo(host, None)
        except (OSError, UnicodeError) as error:
            raise ConfigurationError(
                f"--main_process_ip {host!r} is not a known host: {error}. Give the address of the machine of rank 0."
            ) from None
        given = options.rdzv_backend == "static" and not isinstance(num_machines, MachineRange)
        serves = options.machine_rank == 0 and (num_machines == 1 or given)
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


def _wait_for_name(host: str, seconds: float) -> None:
    """Wait until the name of another pod resolves, which begins when the pod has an address.

    Raises:
        ConfigurationError: it does not in time.
    """
    begin, noted = time.monotonic(), False
    while True:
        try:
            socket.getaddrinfo(host, None)
            return
        except OSError as error:
            waited = time.monotonic() - begin
            if waited > seconds:
                raise ConfigurationError(
                    f"the name {host} did not resolve within {seconds:g} s: {error.strerror}. Check with `kubectl get "
                    "pods` whether the pod with index 0 runs, and whether the headless service of the Job exists, with "
                    "publishNotReadyAddresses."
                ) from None
        if waited > _NOTE_SECONDS and not noted:
            noted = True
            say(f"waiting for the name {host} to resolve (up to {seconds:g} s)")
        time.sleep(_LOOK_SECONDS)

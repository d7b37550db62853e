"""Network interfaces of this machine, and the variables with which gloo and NCCL use one of them. Torch-free."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterator

from accel_state.env import read_str
from accel_state.errors import ConfigurationError
from accel_state.ports import socket_variables

_FAMILIES = (socket.AF_INET, socket.AF_INET6)


def _addresses() -> Iterator[tuple[str, str]]:
    """Interfaces with each of their addresses."""
    import psutil  # needed with several machines only

    for name, entries in psutil.net_if_addrs().items():
        for entry in entries:
            if entry.family in _FAMILIES:
                yield name, entry.address.partition("%")[0]


def addresses_here() -> list[str]:
    """Return the addresses of this machine by which others may reach it."""
    found = [ipaddress.ip_address(address) for _, address in _addresses()]
    return [str(address) for address in found if not (address.is_loopback or address.is_link_local)]


def interface_of(address: str) -> str:
    """Return the interface that has an address; empty if none has."""
    wanted = address.partition("%")[0]
    return next((name for name, found in _addresses() if found == wanted), "")


def interface_variables(address: str) -> dict[str, str]:
    """Return the variables that select an address's interface for collective libraries, unless the user has set one.

    Args:
        address: of this machine, from which it reaches the others; empty if that is not known.
    """
    name = interface_of(address) if address else ""
    chosen = socket_variables(name) if name else {}
    return {variable: value for variable, value in chosen.items() if not read_str(variable)}


def own_address(other: str) -> str:
    """Return the address of this machine from which it reaches another one.

    It is an IPv4 address if the other one has any.
    """
    try:
        found = socket.getaddrinfo(other, 9, type=socket.SOCK_DGRAM)
    except OSError as error:
        raise ConfigurationError(
            f"--main_process_ip {other}: {error.strerror}. Give an address of machine rank 0, or a name that has one."
        ) from None
    family, kind, protocol, _, address = min(found, key=lambda each: each[0] != socket.AF_INET)
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # sends nothing
        return str(probe.getsockname()[0])

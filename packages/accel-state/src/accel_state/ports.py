"""TCP ports."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import random
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

LOOPBACK = "127.0.0.1"
"""The address that only this machine reaches."""
DEFAULT_PORT = 29500
"""Port on the machine of rank 0 at which several machines meet; also torch's default for the main process."""

_EPHEMERAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
# Above the ports that jobs of SLURM and MPI derive from their names.
_LOWEST_PORT = 25000
_NOT_FREE = (errno.EADDRINUSE, errno.EACCES)


def get_free_port() -> int:
    """Find a TCP port that nothing on this machine listens on.

    It is below the ephemeral range if possible, so that no outgoing connection takes it before the caller listens.
    """
    with _taken_port() as holder:
        return int(holder.getsockname()[1])


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """Reserve a free TCP port on this machine: within the context, :func:`get_free_port` of no process returns it.

    A server that sets SO_REUSEADDR, as torch's stores do, can listen on it. This needs Linux; on other systems the
    port is only known to be free when the context is entered.
    """
    with _taken_port() as holder:
        port = int(holder.getsockname()[1])
        if sys.platform == "linux":
            # After bind: a search for a free port, which binds without the option, fails; a server with it succeeds.
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        else:
            holder.close()
        yield port


def _taken_port() -> socket.socket:
    """Return a socket bound to a free port that does not listen."""
    candidates = range(_LOWEST_PORT, _first_ephemeral_port())
    # SystemRandom: independent of the seed that the user set.
    generator = random.SystemRandom()
    for _ in range(64 if candidates else 0):
        holder = _bound(generator.choice(candidates))
        if holder is not None:
            return holder
    holder = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    holder.bind(("", 0))
    return holder


def _bound(port: int) -> socket.socket | None:
    holder = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        # Without SO_REUSEADDR, so that bind fails on a reserved port, and on one whose last connection is closing.
        holder.bind(("", port))
    except OSError:
        holder.close()
        return None
    return holder


def is_port_in_use(port: int | None = None) -> bool:
    """Return True if something on this machine listens on a TCP port.

    Args:
        port: 29500, torch's default for the main process, when None.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as client:
        client.settimeout(1.0)
        return client.connect_ex(("localhost", DEFAULT_PORT if port is None else port)) == 0


def is_loopback(host: str) -> bool:
    """Return True if a host is written as an address that only this machine reaches: 127.0.0.1, ::1, localhost.

    The name of a machine is not, though some systems resolve it to such an address on the machine itself.
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_free(port: int, host: str = "") -> bool:
    """Return True if a server could listen on the port now, at one of this machine's addresses, or (empty) at all."""
    family, kind, protocol, _, address = socket.getaddrinfo(
        host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    with socket.socket(family, kind, protocol) as server:
        # Servers set this: a port in TIME_WAIT after a run that just ended is free.
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind(address)
        except OSError as error:
            if error.errno in _NOT_FREE:
                return False
            raise
    return True


def is_local(host: str) -> bool:
    """Return True if a host name or address belongs to this machine."""
    try:
        return is_free(0, host)
    except OSError:
        return False


def listening_host(host: str) -> str:
    """Return the address at which a server listens that is reached under ``host``; empty for all of this machine.

    It is that of ``host``, and so of one interface, except where that would keep other machines out: the address is
    translated on the way (containers), or this machine resolves its own name to a loopback address.
    """
    if is_loopback(host):
        return host
    return host if is_local(host) and not _resolves_to_loopback(host) else ""


def _resolves_to_loopback(host: str) -> bool:
    return is_loopback(str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0]))


def parse_listening_address(text: str) -> tuple[str, int]:
    """Return the address and port in ``PORT`` or ``ADDRESS:PORT``; an IPv6 address is in brackets.

    Returns:
        The address, which is that of the loopback interface for a port alone, and the port.

    Raises:
        ValueError: the text is something else.
    """
    host, separator, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if port.isascii() and port.isdigit() and 0 < int(port) < 65536 and bracketed == (":" in host):
        with contextlib.suppress(ValueError):
            address = host[1:-1] if bracketed else host
            return str(ipaddress.ip_address(address if separator else LOOPBACK)), int(port)
    raise ValueError(f"{text!r} is not a port, such as 9400, or ADDRESS:PORT, such as 0.0.0.0:9400 or [::1]:9400")


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens at one address of this machine.

    Args:
        host: the address, or a name that resolves to it; empty for all addresses.
        port: 0 for any free one.

    Raises:
        OSError: the port is in use, or the address belongs to another machine.
    """
    if not host:
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        return socket.create_server(("", port), family=family, dualstack_ipv6=dual, backlog=socket.SOMAXCONN)
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return socket.create_server(address, family=family, backlog=socket.SOMAXCONN)


def loopback_variables() -> dict[str, str]:
    """Return the variables with which gloo and NCCL connect over the loopback interface, and so listen there only."""
    for _, name in socket.if_nameindex() if sys.platform != "win32" else ():
        if name in ("lo", "lo0"):
            return socket_variables(name)
    return {}


def socket_variables(interface: str) -> dict[str, str]:
    """Return the variables with which gloo and NCCL connect over one network interface of this machine."""
    # NCCL takes the name as a prefix: "eth1" would also be eth10, and "=eth1" is not. There is one loopback interface.
    is_loopback_name = interface in ("lo", "lo0")
    return {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface if is_loopback_name else f"={interface}"}


def _first_ephemeral_port() -> int:
    try:
        return int(_EPHEMERAL_RANGE.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        # Not Linux: the ephemeral range is unknown, so let the system choose a port.
        return _LOWEST_PORT

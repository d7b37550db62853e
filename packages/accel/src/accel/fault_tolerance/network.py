"""How the processes of replicas reach each other: directly on one machine, through tunnels between machines."""

from __future__ import annotations

from accel_state.ports import LOOPBACK, get_free_port, is_loopback
from accel_state.tunnel import TunnelClient, TunnelServer


class Network:
    """The addresses of this replica, and the ways to others.

    torchft's managers and torch's stores listen on the loopback address only, because they cannot check a token. A
    server that listens there at a port is reached from other machines at the same port of ``host``, through a tunnel.

    Args:
        host: the address under which other machines reach this replica; None if all are on this one.
        token: of the run.
    """

    def __init__(self, host: str | None, token: bytes) -> None:
        self.token = token
        self._has_tunnels = host is not None and not is_loopback(host)
        self.host: str = host if host is not None and self._has_tunnels else LOOPBACK
        """The address of this replica in what it tells the others."""
        self._servers: list[TunnelServer] = []
        self._clients: dict[str, TunnelClient] = {}

    def port(self) -> int:
        """Return a port for a server on the loopback address; 0, for any, if no tunnel leads to it."""
        return get_free_port() if self._has_tunnels else 0

    def open(self, *ports: int) -> None:
        """Let processes of the run on other machines reach the servers at these ports."""
        if self._has_tunnels:
            self._servers += [TunnelServer(self.host, port, port, self.token) for port in ports]

    def reach(self, purpose: str, address: str) -> str:
        """Return how this process reaches a server.

        Args:
            purpose: what for; the former way for the same purpose is closed.
            address: its host and port, or its URL.
        """
        scheme, separator, rest = address.rpartition("://")
        host, _, port = rest.rpartition(":")
        if not self._has_tunnels:
            return address
        if host.strip("[]") == self.host:
            return f"{scheme}{separator}{LOOPBACK}:{port}"
        former = self._clients.pop(purpose, None)
        if former is not None:
            former.close()
        self._clients[purpose] = client = TunnelClient((host.strip("[]"), int(port)), self.token)
        return f"{scheme}{separator}{LOOPBACK}:{client.port}"

    def close(self) -> None:
        """Close all tunnels."""
        for tunnel in (*self._servers, *self._clients.values()):
            tunnel.close()

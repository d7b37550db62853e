"""What a launcher tells a process about its place in the run, and the checks that hold for every launcher."""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from ..errors import ConfigurationError

# Above the well-known services, below the ports that get_free_port gives and those of outgoing connections.
_DERIVED_PORTS = range(15000, 25000)


class Variables:
    """Environment variables with checked types.

    Args:
        environ: the process's environment, or a stand-in for it.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ

    def __contains__(self, name: str) -> bool:
        return self.text(name) is not None

    def text(self, name: str) -> str | None:
        """The value, or None where the variable is unset or empty."""
        return self._environ.get(name, "").strip() or None

    def integer(self, name: str, minimum: int = 0) -> int | None:
        """The value as an integer, or None where the variable is unset or empty.

        Raises:
            ConfigurationError: not an integer, or below ``minimum``.
        """
        text = self.text(name)
        if text is None:
            return None
        try:
            value = int(text)
        except ValueError:
            raise ConfigurationError(f"{name}={text!r} is not an integer. Correct the variable, or unset it.") from None
        if value < minimum:
            raise ConfigurationError(f"{name}={value} must be at least {minimum}. Correct the variable, or unset it.")
        return value

    def required(self, name: str, because: str, minimum: int = 0) -> int:
        """The value as an integer.

        Args:
            name: of the variable.
            minimum: the least value allowed.
            because: the variable that makes this one necessary, for the message.

        Raises:
            ConfigurationError: unset, not an integer, or below ``minimum``.
        """
        value = self.integer(name, minimum)
        if value is None:
            raise ConfigurationError(
                f"{because} is set but {name} is not. A launcher sets both: set {name} too, or unset {because}."
            )
        return value

    def first(self, *names: str) -> str | None:
        """The first of the names that is set."""
        return next((name for name in names if name in self), None)


@dataclass(frozen=True)
class Environment(ABC):
    """A process's place in the run.

    Attributes:
        rank: of this process among all, 0 <= rank < world_size.
        world_size: number of processes.
        local_rank: of this process among those on its node.
        local_world_size: number of processes on its node.
        node_rank: of this process's node.
        num_nodes: number of nodes.
        main_address: host of rank 0, where the processes meet; None when the launcher doesn't tell.
        main_port: port at that host; None when the launcher doesn't tell.

    Raises:
        ConfigurationError: the numbers contradict each other.
    """

    name: ClassVar[str]
    """What the launcher is registered as."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    num_nodes: int
    main_address: str | None = None
    main_port: int | None = None

    def __post_init__(self) -> None:
        self._check_below("rank", self.rank, "world size", self.world_size)
        self._check_below("local rank", self.local_rank, "local world size", self.local_world_size)
        self._check_below("node rank", self.node_rank, "number of nodes", self.num_nodes)
        if self.local_world_size > self.world_size:
            raise self._contradiction(
                f"the local world size {self.local_world_size} exceeds the world size {self.world_size}"
            )
        if self.main_port is not None and not 0 < self.main_port < 65536:
            raise self._contradiction(f"the main port {self.main_port} is not between 1 and 65535")

    def _check_below(self, what: str, value: int, limit_name: str, limit: int) -> None:
        if not 0 <= value < limit:
            raise self._contradiction(f"the {what} {value} is not between 0 and the {limit_name} {limit} (exclusive)")

    def _contradiction(self, what: str) -> ConfigurationError:
        return ConfigurationError(f"the variables of the {self.name} environment contradict each other: {what}.")

    @classmethod
    @abstractmethod
    def read(cls, variables: Variables) -> Environment | None:
        """This process's place as the launcher's variables tell it, or None where that launcher did not start it.

        Raises:
            ConfigurationError: a variable is missing, not an integer, or contradicts another.
        """

    @classmethod
    def from_counts(
        cls,
        variables: Variables,
        rank: int,
        world_size: int,
        local_rank: int,
        local_world_size: int,
        job: str | None = None,
    ) -> Environment:
        """Complete what an MPI launcher tells.

        MPI launchers number neither the nodes nor an address. Nodes are counted as if filled one after the other, with
        equally many ranks each. The address is that of MASTER_ADDR; without it, 127.0.0.1 where all ranks are on one
        node. The port is MASTER_PORT; without it, one derived from ``job``, so that two jobs on one host do not meet at
        the same port.

        Args:
            variables: where MASTER_ADDR and MASTER_PORT are looked up.
            rank: of this process.
            world_size: number of processes.
            local_rank: of this process on its node.
            local_world_size: number of processes on its node.
            job: any text that is the same on all ranks of a job and differs between jobs.
        """
        # Checked here too: the divisions below need it, and __post_init__ comes after them.
        nodes = -(-world_size // local_world_size) if 0 < local_world_size <= world_size else 1
        address, port = main_endpoint(variables, one_node=local_world_size == world_size, job=job)
        node_rank = min(rank // max(local_world_size, 1), nodes - 1)
        return cls(rank, world_size, local_rank, local_world_size, node_rank, nodes, address, port)


def main_endpoint(variables: Variables, one_node: bool, job: str | None) -> tuple[str | None, int | None]:
    """Where the processes meet; see :meth:`Environment.from_counts`."""
    address = variables.text("MASTER_ADDR") or ("127.0.0.1" if one_node else None)
    port = variables.integer("MASTER_PORT", minimum=1)
    if port is None and job is not None:
        port = _DERIVED_PORTS[zlib.crc32(job.encode()) % len(_DERIVED_PORTS)]
    return address, port

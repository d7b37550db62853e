"""A process's rank as its launcher sets it, and the checks common to all launchers."""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from ..env import read_int, read_str
from ..errors import ConfigurationError

# Above well-known ports, and below those of get_free_port and outgoing connections.
_DERIVED_PORTS = range(15000, 25000)


class Variables:
    """Environment variables, read with type checks from a mapping, by default from those of this process."""

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        self._environ = environ

    def __contains__(self, name: str) -> bool:
        return self.text(name) is not None

    def text(self, name: str) -> str | None:
        """Return the value, or None if the variable is unset or empty."""
        return (read_str(name, environ=self._environ) or "").strip() or None

    def integer(self, name: str, minimum: int = 0) -> int | None:
        """Return the value as an integer of at least ``minimum``; it is required where ``because`` is set."""
        value = read_int(name, self._environ)
        if value is not None and value < minimum:
            raise ConfigurationError(f"{name}={value} must be at least {minimum}. Correct the variable, or unset it.")
        return value

    def required(self, name: str, because: str, minimum: int = 0) -> int:
        """Return the value as an integer of at least ``minimum``; it is required where ``because`` is set."""
        value = self.integer(name, minimum)
        if value is None:
            raise ConfigurationError(
                f"{because} is set but {name} is not. Set both, as launchers do, or unset {because}."
            )
        return value

    def first(self, *names: str) -> str | None:
        """Return the first of the names that is set."""
        return next((name for name in names if name in self), None)


@dataclass(frozen=True)
class Environment(ABC):
    """A process's rank in the run.

    Raises:
        ConfigurationError: the numbers contradict each other.
    """

    name: ClassVar[str]
    """The registered name of the launcher."""

    rank: int  # rank among all processes, 0 <= rank < world_size
    world_size: int  # number of processes
    local_rank: int  # rank among the processes of this node
    local_world_size: int  # number of processes of this node
    node_rank: int  # rank of this node
    num_nodes: int  # number of nodes
    main_address: str | None = None  # host of rank 0, for the rendezvous; None if unknown
    main_port: int | None = None  # port on that host; None if unknown

    def __post_init__(self) -> None:
        for what, value, limit_name, limit in (
            ("rank", self.rank, "world size", self.world_size),
            ("local rank", self.local_rank, "local world size", self.local_world_size),
            ("node rank", self.node_rank, "number of nodes", self.num_nodes),
        ):
            if not 0 <= value < limit:
                raise self._contradiction(
                    f"the {what} {value} is not between 0 and the {limit_name} {limit} (exclusive)"
                )
        if self.local_world_size > self.world_size:
            raise self._contradiction(
                f"the local world size {self.local_world_size} exceeds the world size {self.world_size}"
            )
        if self.main_port is not None and not 0 < self.main_port < 65536:
            raise self._contradiction(f"the main port {self.main_port} is not between 1 and 65535")

    def _contradiction(self, what: str) -> ConfigurationError:
        return ConfigurationError(f"the variables of the {self.name} environment contradict each other: {what}.")

    @classmethod
    @abstractmethod
    def read(cls, variables: Variables) -> Environment | None:
        """Read the rank from the launcher's variables; None if that launcher did not start this process.

        Raises:
            ConfigurationError: a variable is missing, not an integer, or contradicts another.
        """

    @classmethod
    def from_mpi(cls, variables: Variables, prefix: str, job_variable: str) -> Environment | None:
        """Read ``<prefix>_RANK``, ``_SIZE``, ``_LOCAL_RANK`` and ``_LOCAL_SIZE``; None without the first."""
        first = f"{prefix}_RANK"
        rank = variables.integer(first)
        if rank is None:
            return None
        world_size = variables.required(f"{prefix}_SIZE", first, minimum=1)
        local_rank = variables.required(f"{prefix}_LOCAL_RANK", first)
        local_world_size = variables.required(f"{prefix}_LOCAL_SIZE", first, minimum=1)
        job = variables.text(job_variable)
        return cls.from_counts(variables, rank, world_size, local_rank, local_world_size, job)

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
        """Complete the counts of an MPI launcher, which sets no node rank and no address.

        Nodes are assumed to be filled in rank order with equal numbers of ranks. The address is MASTER_ADDR, or
        127.0.0.1 on a single node. The port is MASTER_PORT, or is derived from ``job``, a text that is equal on all
        ranks of a job and differs between jobs.
        """
        # Checked before __post_init__, because the divisions need it.
        nodes = -(-world_size // local_world_size) if 0 < local_world_size <= world_size else 1
        address, port = main_endpoint(variables, one_node=local_world_size == world_size, job=job)
        node_rank = min(rank // max(local_world_size, 1), nodes - 1)
        return cls(rank, world_size, local_rank, local_world_size, node_rank, nodes, address, port)


def main_endpoint(variables: Variables, one_node: bool, job: str | None) -> tuple[str | None, int | None]:
    """Address and port of the rendezvous; see :meth:`Environment.from_counts`."""
    address = variables.text("MASTER_ADDR") or ("127.0.0.1" if one_node else None)
    port = variables.integer("MASTER_PORT", minimum=1)
    if port is None and job is not None:
        port = _DERIVED_PORTS[zlib.crc32(job.encode()) % len(_DERIVED_PORTS)]
    return address, port

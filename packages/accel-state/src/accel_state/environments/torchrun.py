"""torchrun, and others that set its variables: ``accel launch``, DeepSpeed's launcher, Kubernetes operators, users."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import ConfigurationError
from .base import Environment, Variables


@dataclass(frozen=True)
class TorchrunEnvironment(Environment):
    """RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK, GROUP_WORLD_SIZE, MASTER_ADDR, MASTER_PORT.

    If only RANK and WORLD_SIZE are set (as by Kubernetes operators), each node has one process.
    """

    name = "torchrun"

    @classmethod
    def read(cls, variables: Variables) -> Environment | None:
        """See the base class. WORLD_SIZE without RANK is ignored: several schedulers set it for batch shells."""
        if "RANK" not in variables:
            _refuse_lone_local_rank(variables)
            return None
        rank = variables.required("RANK", because="WORLD_SIZE")
        world_size = variables.required("WORLD_SIZE", because="RANK", minimum=1)
        local_rank = variables.integer("LOCAL_RANK")
        local_world_size = variables.integer("LOCAL_WORLD_SIZE", minimum=1)
        if local_world_size is None:
            # A local rank without a count: assume that all processes are on one node.
            local_world_size = 1 if local_rank is None else world_size
        if local_rank is None:
            local_rank = rank % local_world_size
        nodes = variables.integer("GROUP_WORLD_SIZE", minimum=1) or max(-(-world_size // local_world_size), 1)
        node_rank = variables.integer("GROUP_RANK")
        if node_rank is None:
            node_rank = min(rank // local_world_size, nodes - 1)
        address, port = variables.text("MASTER_ADDR"), variables.integer("MASTER_PORT", minimum=1)
        return cls(rank, world_size, local_rank, local_world_size, node_rank, nodes, address, port)


def _refuse_lone_local_rank(variables: Variables) -> None:
    # -1 is an old convention for "not distributed".
    local_rank = variables.integer("LOCAL_RANK", minimum=-1)
    if local_rank is not None and local_rank > 0:
        raise ConfigurationError(
            f"LOCAL_RANK={local_rank} is set but RANK is not. Set RANK, WORLD_SIZE and LOCAL_RANK, as launchers do, or "
            "unset LOCAL_RANK. Under Lightning's launcher, wait until it has created the process group: after "
            "fabric.launch(), or in the hooks of a module."
        )

"""A single process without a launcher."""

from __future__ import annotations

from dataclasses import dataclass

from .base import Environment, Variables


@dataclass(frozen=True)
class SingleEnvironment(Environment):
    """Rank 0 of 1."""

    name = "single"

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0
    num_nodes: int = 1

    @classmethod
    def read(cls, variables: Variables) -> Environment | None:
        return cls()

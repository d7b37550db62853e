"""Collectives of a process that has the rank of another one, which alone can communicate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from ..errors import ConfigurationError
from .single import Collectives


class RefusedCollectives(Collectives):
    """Refuses every collective: for the workers that a rank starts, which inherit its variables.

    Args:
        rank: the rank of the process that started this one.
        world_size: number of ranks.
        owner: the process id of that process.
    """

    def __init__(self, rank: int, world_size: int, owner: int) -> None:
        self.rank: int = rank
        self.world_size: int = world_size
        self._started_by = owner

    def _refuse(self, operation: str) -> NoReturn:
        raise ConfigurationError(
            f"{operation} was called in a process that was started by rank {self.rank} of {self.world_size} (pid "
            f"{self._started_by}), which is the one that communicates. Call it there, and pass its result here; or "
            "unset RANK and WORLD_SIZE here, for a run of its own."
        )

    def shutdown(self) -> None:
        """There is no group to leave."""


def _refusing(operation: str) -> Callable[..., Any]:
    def refuse(self: RefusedCollectives, *_: Any, **__: Any) -> Any:
        self._refuse(operation)

    return refuse


for _operation in (
    *("over", "barrier", "all_gather", "all_reduce", "broadcast", "scatter", "all_to_all"),
    *("all_gather_object", "gather_object", "broadcast_object", "scatter_object", "exchange_header"),
):
    setattr(RefusedCollectives, _operation, _refusing(_operation))

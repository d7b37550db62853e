"""What the agent needs of a rendezvous, static or torch's: where the machines have met, and whether they must again."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from torch.distributed.elastic.rendezvous.api import RendezvousClosedError

from ..network.board import Board
from ..network.records import Cause


class RunEnded(RendezvousClosedError):
    """The run has ended with success, without this machine."""


@dataclass(frozen=True)
class Meeting:
    """Where the machines have met for a start of the ranks."""

    rank: int  # of this machine
    machines: int
    address: str  # of the store of the ranks
    port: int
    restarts: int  # of the run, so far
    board: Board | None = None  # what the launchers know of each other; None on a single machine
    sizes: Sequence[int] = ()  # ranks of each machine; empty where all have as many as this one
    news: str = ""  # why the ranks are started again, if the rendezvous knows
    is_failure: bool = True  # whether they are because a process failed


class Meetings(ABC):
    """The meetings of a run: one before each start of the ranks."""

    run_id: str
    round = 0
    """The start that the ranks belong to, as the other machines count."""
    may_hang = False
    """Whether a call may hang for minutes when a machine is lost, so that another thread must end the ranks."""
    may_shrink = False
    """Whether the run continues without machines that are lost or leave, and counts restarts itself."""

    def may_leave(self, number: int) -> bool:
        """Whether the others continue when this signal ends the launcher; 0 is no signal."""
        return False

    def may_save(self) -> bool:
        """Whether the ranks can still save between two steps: those of all other machines run."""
        return False

    @abstractmethod
    def meet(self, restarts: int) -> Meeting:
        """Wait for all other machines.

        Args:
            restarts: those that this machine has counted.

        Raises:
            RendezvousError: of torch, with the reason why the machines did not meet.
            ConfigurationError: the machines disagree, or one of them cannot start.
        """

    @abstractmethod
    def is_awaited(self) -> bool:
        """Whether another machine needs a meeting: it has joined, or asks for a restart."""

    @abstractmethod
    def withdraw(self, cause: Cause) -> None:
        """Leave after an error of this launcher, and tell the others why."""

    @abstractmethod
    def leave(self) -> None:
        """Leave, and close the store of the ranks."""

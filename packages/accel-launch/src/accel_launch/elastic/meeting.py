"""What the agent needs of a rendezvous, static or torch's: where the machines have met, and whether they must again."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from ..network.board import Board
from ..network.records import Cause


@dataclass(frozen=True)
class Meeting:
    """Where the machines have met for a start of the ranks."""

    rank: int  # of this machine
    machines: int
    address: str  # of the store of the ranks
    port: int
    restarts: int  # of the run, so far
    board: Board | None = None  # what the launchers know of each other; None on a single machine


class Meetings(ABC):
    """The meetings of a run: one before each start of the ranks."""

    run_id: str
    round = 0
    """The start that the ranks belong to, as the other machines count."""
    may_hang = False
    """Whether a call may hang for minutes when a machine is lost, so that another thread must end the ranks."""

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

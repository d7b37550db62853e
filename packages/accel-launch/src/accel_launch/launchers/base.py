"""What a launcher is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from accel_state.errors import ConfigurationError

from ..plan import Plan


@dataclass(frozen=True)
class Start:
    """A command that is run on a machine.

    Attributes:
        machine: which one, in words.
        command: its words.
        environment: variables on top of those of the machine.
        ranks: what each process that the command stands for has in its environment beside these; none where the command
            itself starts the ranks.
        notes: what else happens, in words.
    """

    machine: str
    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    ranks: Sequence[Mapping[str, str]] = ()
    notes: Sequence[str] = ()


class Launcher(ABC):
    """Starts the processes of a plan on this machine."""

    @abstractmethod
    def accepts(self, plan: Plan) -> bool:
        """Whether this launcher is the one for the plan."""

    @abstractmethod
    def run(self, plan: Plan) -> int:
        """Start the processes, wait for them, and return the exit code as a shell would show it.

        Raises:
            ConfigurationError: nothing was started, for a reason that the user can mend.
        """

    def starts(self, plan: Plan) -> Sequence[Start]:
        """What :meth:`run` would run, machine by machine. Nothing is started, and nothing is written.

        Raises:
            ConfigurationError: as for :meth:`run`, as far as it can be known without starting anything; or the launcher
                cannot tell.
        """
        raise ConfigurationError(
            f"{type(self).__name__} cannot say what it would start: --dry_run is for launchers that can."
        )

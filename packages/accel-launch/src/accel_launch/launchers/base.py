"""The interface of a launcher."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from accel_state.errors import ConfigurationError

from ..launch_mode import LaunchMode
from ..launch_plan import LaunchPlan


@dataclass(frozen=True)
class MachineCommand:
    """A command that runs on a machine.

    Attributes:
        machine: description of the machine.
        command: the command.
        environment: variables on top of those of the machine.
        ranks: further variables of each process; empty if the command itself starts the ranks.
        notes: further information for the user.
    """

    machine: str
    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    ranks: Sequence[Mapping[str, str]] = ()
    notes: Sequence[str] = ()


class Launcher(ABC):
    """Starts the processes of a plan on this machine.

    Attributes:
        mode: the mode that :meth:`accepts` compares with the plan's.
    """

    mode: LaunchMode | None = None

    def accepts(self, plan: LaunchPlan) -> bool:
        """Whether this launcher starts the plan."""
        return plan.mode is self.mode

    @abstractmethod
    def run(self, plan: LaunchPlan) -> int:
        """Start the processes, wait for them, and return the exit code as a shell would show it.

        Raises:
            ConfigurationError: the processes cannot be started.
        """

    def commands(self, plan: LaunchPlan) -> Sequence[MachineCommand]:
        """The commands that :meth:`run` would run, by machine. Starts and writes nothing.

        Raises:
            ConfigurationError: as for :meth:`run`, or the launcher does not support --dry_run.
        """
        raise ConfigurationError(f"{type(self).__name__} does not support --dry_run. Leave the option out.")

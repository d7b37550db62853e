"""What a launcher is."""

from __future__ import annotations

from abc import ABC, abstractmethod

from ..plan import Plan


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

"""One process: the launcher becomes the script."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence

from accel_state.errors import ConfigurationError

from ..interpreter import python_command
from ..launch_mode import Kind
from ..plan import Plan
from .base import Launcher, Start


def restore_signals() -> None:
    """Undo what Python ignores at its start, which an executable would inherit: writing into a closed pipe no longer
    ended it.
    """
    for name in ("SIGPIPE", "SIGXFSZ"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_DFL)


def become(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Replace this process. On Windows, where that is not possible, run a child and return its exit code.

    Raises:
        ConfigurationError: the command cannot be started.
    """
    if sys.platform == "win32":
        return subprocess.call(command, env=environment)
    sys.stdout.flush()
    sys.stderr.flush()
    restore_signals()
    try:
        os.execvpe(command[0], list(command), dict(environment))
    except OSError as error:
        raise ConfigurationError(f"{command[0]} cannot be started: {error.strerror}.") from None


class SingleLauncher(Launcher):
    """Replaces this process by the script, so that its exit code, its signals and its terminal are its own."""

    def accepts(self, plan: Plan) -> bool:
        """One process in all, which nobody has to start again, and whose output goes to the screen alone."""
        return plan.kind is Kind.LOCAL and not plan.is_watched

    def run(self, plan: Plan) -> int:
        """Become the script."""
        return become(self.starts(plan)[0].command, plan.full_environment())

    def starts(self, plan: Plan) -> Sequence[Start]:
        """The script."""
        # Through a pipe, Python would otherwise hand over what a script prints in blocks of 8 kB, long after the fact.
        return [Start("this machine", plan.target.command(python_command("-u")), plan.environment)]

"""One process: the launcher becomes the script."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from accel_state.errors import ConfigurationError

from ..interpreter import python_command
from ..plan import Plan
from .base import Launcher


def restore_signals() -> None:
    """Undo what Python ignores at its start, which an executable would inherit: writing into a closed pipe no longer ended it."""
    for name in ("SIGPIPE", "SIGXFSZ"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_DFL)


class SingleLauncher(Launcher):
    """Replaces this process by the script, so that its exit code, its signals and its terminal are its own."""

    def accepts(self, plan: Plan) -> bool:
        """One process in all."""
        return plan.num_processes == 1

    def run(self, plan: Plan) -> int:
        """Replace this process. On Windows, where that is not possible, run a child and return its exit code."""
        # Through a pipe, Python would otherwise hand over what a script prints in blocks of 8 kB, long after the fact.
        command = plan.target.command(python_command("-u"))
        environment = plan.full_environment()
        if sys.platform == "win32":
            return subprocess.call(command, env=environment)
        sys.stdout.flush()
        sys.stderr.flush()
        restore_signals()
        try:
            os.execve(command[0], command, environment)
        except OSError as error:
            raise ConfigurationError(f"{command[0]} cannot be started: {error.strerror}.") from None

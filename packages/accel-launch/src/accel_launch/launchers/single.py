"""One process: the launcher becomes the script."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence

from accel_state.errors import ConfigurationError
from accel_state.ports import LOOPBACK, get_free_port

from ..entrypoint import python_command
from ..launch_plan import LaunchPlan
from .base import Launcher, MachineCommand


def become(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Replace this process. On Windows, which cannot, run a child and return its exit code."""
    if sys.platform == "win32":
        return subprocess.call(command, env=environment)
    sys.stdout.flush()
    sys.stderr.flush()
    # Python ignores these at start; an executable would inherit that, and survive writing to a closed pipe.
    for name in ("SIGPIPE", "SIGXFSZ"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_DFL)
    try:
        os.execvpe(command[0], list(command), dict(environment))
    except OSError as error:
        raise ConfigurationError(f"{command[0]} cannot be started: {error.strerror}.") from None


class SingleLauncher(Launcher):
    """Becomes the script, so that exit code, signals and terminal are the script's own."""

    def run(self, plan: LaunchPlan) -> int:
        start = self.commands(plan)[0]
        return become(start.command, process_environment(plan, start))

    def commands(self, plan: LaunchPlan) -> Sequence[MachineCommand]:
        """Return the script, with torchrun's variables for a script that creates a process group itself."""
        variables = {"RANK": "0", "LOCAL_RANK": "0", "GROUP_RANK": "0"}
        variables |= {"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "GROUP_WORLD_SIZE": "1"}
        variables["MASTER_ADDR"] = LOOPBACK
        port, notes = plan.rendezvous.main_process_port, []
        if port:
            variables["MASTER_PORT"] = str(port)
        else:
            notes.append("MASTER_PORT: a port that is free when the process starts")
        # -u: Python would otherwise write to a pipe in blocks of 8 kB, late.
        command = plan.entrypoint.command(python_command("-u"))
        return [MachineCommand("this machine", command, plan.environment, [variables], notes)]


def process_environment(plan: LaunchPlan, start: MachineCommand) -> dict[str, str]:
    """Return all variables of the one process."""
    return {**plan.full_environment(), "MASTER_PORT": str(get_free_port()), **start.ranks[0]}

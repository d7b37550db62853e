"""A TPU pod: gcloud runs the launcher on each of its machines."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence

from accel_state.errors import ConfigurationError

from ..cloud.gcloud import run_all, ssh_commands
from ..launch_plan import LaunchPlan
from .base import Launcher, MachineCommand, launch_argv

# Options that are not forwarded to the machines of the pod.
_POD_OPTIONS = ("tpu", "tpu_cluster", "tpu_name", "tpu_zone", "tpu_use_sudo", "vm", "env", "command", "command_file")
_LOCAL_OPTIONS = ("config_file", "machine_rank", "num_processes", "num_machines")


class TpuPodLauncher(Launcher):
    """Runs ``accel launch --tpu`` in the same directory on every machine of the pod."""

    def run(self, plan: LaunchPlan) -> int:
        return run_all([start.command for start in self.commands(plan)])

    def commands(self, plan: LaunchPlan) -> Sequence[MachineCommand]:
        """Return the calls of gcloud."""
        machines = plan.settings["vm"]
        commands = ssh_commands(plan.settings["tpu_name"], plan.settings["tpu_zone"], shell_command(plan), machines)
        names = machines or [f"every machine of the TPU {plan.settings['tpu_name']}"]
        notes = ["script, data and accel must be installed there, in the same directories: see accel tpu-config"]
        return [MachineCommand(name, command, notes=notes) for name, command in zip(names, commands, strict=True)]


def shell_command(plan: LaunchPlan) -> str:
    """Return the shell command that every machine runs."""
    variables = {**plan.environment, **dict(map(_assignment, plan.settings["env"]))}
    argv = launch_argv(
        plan,
        without=(*_POD_OPTIONS, *_LOCAL_OPTIONS),
        tpu="true",
        tpu_cluster="false",
        main_training_function=plan.settings["main_training_function"],
    )
    # sudo drops variables, except those that are arguments of env.
    assignments = [f"{name}={value}" for name, value in variables.items()]
    sudo = ["sudo"] if plan.settings["tpu_use_sudo"] else []
    return f"cd {shlex.quote(os.getcwd())} && {shlex.join([*sudo, 'env', *assignments, 'accel', *argv])}"


def _assignment(text: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not sign or not re.fullmatch(r"[A-Za-z_]\w*", name):
        raise ConfigurationError(f"--env {text!r} is not NAME=VALUE.")
    return name, value

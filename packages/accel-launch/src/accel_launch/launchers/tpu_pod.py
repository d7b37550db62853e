"""A TPU pod: gcloud runs the launcher on every one of its machines."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence

from accel_state.errors import ConfigurationError

from ..cloud.gcloud import run_all, ssh_commands
from ..launch_mode import Kind
from ..plan import Plan
from .argv import launch_words
from .base import Launcher, Start

# What this machine alone acts on.
_OF_THE_POD = (
    "tpu_cluster",
    "tpu_name",
    "tpu_zone",
    "tpu_use_sudo",
    "vm",
    "env",
    "config_file",
    "machine_rank",
    "command",
    "command_file",
)


class TpuPodLauncher(Launcher):
    """Runs ``accel launch --tpu`` in the same folder on every machine of the pod."""

    def accepts(self, plan: Plan) -> bool:
        """A TPU of several hosts."""
        return plan.kind is Kind.TPU_POD

    def run(self, plan: Plan) -> int:
        """Run gcloud and wait for it."""
        return run_all([start.command for start in self.starts(plan)])

    def starts(self, plan: Plan) -> Sequence[Start]:
        """The calls of gcloud."""
        machines = plan.settings["vm"]
        commands = ssh_commands(plan.settings["tpu_name"], plan.settings["tpu_zone"], remote_line(plan), machines)
        names = machines or [f"every machine of the TPU {plan.settings['tpu_name']}"]
        notes = [
            "script, data and accel must be there, in the same folders: accel tpu-config runs commands that install "
            "them"
        ]
        return [Start(name, command, notes=notes) for name, command in zip(names, commands, strict=True)]


def remote_line(plan: Plan) -> str:
    """The line of shell that every machine runs."""
    variables = {**plan.environment, **dict(map(_assignment, plan.settings["env"]))}
    function = {"main_training_function": plan.settings["main_training_function"]}
    words = launch_words(
        plan,
        without=(*_OF_THE_POD, "tpu", "num_processes", "num_machines"),
        tpu="true",
        tpu_cluster="false",
        **function,
    )
    # As an argument of env, they survive sudo.
    pairs = [f"{name}={value}" for name, value in variables.items()]
    sudo = ["sudo"] if plan.settings["tpu_use_sudo"] else []
    return f"cd {shlex.quote(os.getcwd())} && {shlex.join([*sudo, 'env', *pairs, 'accel', *words])}"


def _assignment(text: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not sign or not re.fullmatch(r"[A-Za-z_]\w*", name):
        raise ConfigurationError(f"--env {text!r} is not NAME=VALUE.")
    return name, value

"""The registry of subcommands; other packages add theirs through the entry point group ``accel.commands``."""

from __future__ import annotations

from accel_state.command import Command
from accel_state.registry import Registry

COMMANDS: Registry[Command] = Registry(
    "command",
    {
        "launch": "accel_launch.commands.launch:COMMAND",
        "config": "accel_launch.commands.config:COMMAND",
        "env": "accel_launch.commands.env:COMMAND",
        "doctor": "accel_launch.commands.doctor:COMMAND",
        "tpu-config": "accel_launch.commands.tpu_config:COMMAND",
        "k8s": "accel_launch.commands.k8s:COMMAND",
        "sky": "accel_launch.commands.sky:COMMAND",
        "slurm": "accel_launch.commands.slurm:COMMAND",
    },
    "accel.commands",
)

"""``accel launch``."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from accel_state.options import Resolution, load_groups, resolve

from ..config import read_config
from ..launchers.registry import choose_launcher
from ..parser import parse
from ..plan import Plan, make_plan
from .base import Command


def run(argv: list[str]) -> int:
    """Start what the command line asks for, wait for it, and return its exit code.

    Raises:
        ConfigurationError: the command line, a variable or the configuration file is wrong.
    """
    command_line = parse(argv)
    settings = resolve_settings(command_line.options)
    plan = make_plan(settings, command_line.script, command_line.script_args)
    show_notes(plan)
    return choose_launcher(plan).run(plan)


def resolve_settings(options: Mapping[str, str]) -> Resolution:
    """Settings from the command line, the environment and the configuration file that these two name."""
    groups = load_groups()
    config_path = resolve(groups, {name: text for name, text in options.items() if name == "config_file"})["config_file"]
    return resolve(groups, options, config=read_config(config_path))


def show_notes(plan: Plan, notes: Sequence[str] | None = None) -> None:
    """Print what was decided for the user to stderr, unless he asked for quiet."""
    for note in () if plan.quiet else (plan.notes if notes is None else notes):
        print(f"accel launch: {note}", file=sys.stderr, flush=True)


COMMAND = Command("start a script on one or many processes, on one or many machines", run)

"""``accel launch``."""

from __future__ import annotations

import sys

from accel_state.env import read_str
from accel_state.options import Resolution, check_deepspeed_file

from ..config.read import load_settings
from ..dry_run import render
from ..elastic.worker import RELAY_VARIABLE
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
    settings = load_settings(command_line.options)
    check_deepspeed_file(settings, must_exist=not settings["dry_run"])
    plan = make_plan(settings, command_line.script, command_line.script_args)
    show_notes(plan, settings)
    launcher = choose_launcher(plan)
    if settings["dry_run"]:
        print(render(launcher.starts(plan), as_json=settings["json"]))
        return 0
    return launcher.run(plan)


def show_notes(plan: Plan, settings: Resolution) -> None:
    """Print what was decided for the user to stderr, unless he asked for quiet, or another launcher has said it
    already.
    """
    for note in () if plan.quiet or read_str(RELAY_VARIABLE) else (*settings.notes(), *plan.notes):
        print(f"accel launch: {note}", file=sys.stderr, flush=True)


COMMAND = Command("start a script on one or many processes, on one or many machines", run)

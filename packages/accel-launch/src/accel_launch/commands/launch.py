"""``accel launch``."""

from __future__ import annotations

import sys

from accel_state.command import Command
from accel_state.env import read_str
from accel_state.errors import ConfigurationError
from accel_state.options.deepspeed import check_deepspeed_file
from accel_state.options.resolution import Resolution

from ..config.read import load_settings
from ..dry_run import render
from ..elastic.worker import RELAY_VARIABLE
from ..launch_plan import LaunchPlan, make_plan
from ..launchers.registry import choose_launcher
from ..network.error_reports import report_to_peers
from ..parser import parse

_MAX_SHOWN = 100_000


def run(argv: list[str]) -> int:
    """Start the script, wait for it, and return its exit code.

    Raises:
        ConfigurationError: an error in the command line, in a variable or in the configuration file.
    """
    command_line = parse(argv)
    settings = load_settings(command_line.options)
    try:
        if settings["use_deepspeed"]:
            check_deepspeed_file(settings, must_exist=not settings["dry_run"])
        plan = make_plan(settings, command_line.script, command_line.script_args)
    except ConfigurationError as error:
        report_to_peers(settings, error)
        raise
    show_notes(plan, settings)
    launcher = choose_launcher(plan)
    if settings["dry_run"]:
        if plan.num_processes > _MAX_SHOWN:
            raise ConfigurationError(
                f"{settings.where('num_processes')}: --dry_run shows every process, up to {_MAX_SHOWN}. Give a smaller "
                "number."
            )
        print(render(launcher.commands(plan), as_json=settings["json"]))
        return 0
    return launcher.run(plan)


def show_notes(plan: LaunchPlan, settings: Resolution) -> None:
    """Print the notes to stderr, unless --quiet is set or the launcher that started this one has printed them."""
    if plan.quiet or read_str(RELAY_VARIABLE):
        return
    for note in (*settings.notes(), *plan.notes):
        print(f"accel launch: {note}", file=sys.stderr, flush=True)


COMMAND = Command("start a script on one or many processes and machines", run)

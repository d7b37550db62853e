"""``accel doctor``: checks this machine, or a cluster, and advises on every problem."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from accel_state.command import Command
from accel_state.options import Resolution, load_groups

from ..config.read import load_settings
from ..parser import ConfigParser, find_script, unwrap_lists

DEFAULT_SECONDS = 25.0
_RENDEZVOUS = ("main_process_ip", "main_process_port", "rdzv_backend", "rdzv_conf")
# Those that decide what is started for the checks; all others are only compared between machines.
_OPTIONS = ("cpu", "gpu_ids", "num_processes", "num_machines", "machine_rank", *_RENDEZVOUS)
_EPILOG = """\
On a cluster, run it on every machine with the command line of `accel launch`, all its options and the script, or once
inside a SLURM job. The script is not started: the machines compare what they would start, and the network between
every two of them is measured. The exit code is 0 if all checks passed, else 1.
"""


def run(argv: list[str]) -> int:
    """Print a line for each check, and return 0 if none failed, else 1.

    Raises:
        ConfigurationError: an option is not allowed.
    """
    command_line = read_command_line(argv)
    begin = time.monotonic()
    failed = 0
    for result in _results(command_line):
        failed += result.failed
        print(result.line(), flush=True)
    verdict = f"{failed} check{'' if failed == 1 else 's'} failed" if failed else "all checks passed"
    print(f"\n{verdict} ({time.monotonic() - begin:.1f} s)")
    return 1 if failed else 0


@dataclass(frozen=True)
class CommandLine:
    """What the doctor is asked for."""

    options: dict[str, Any]  # of a launch, as text by name
    script: list[str]  # with its arguments; empty for none
    seconds: float  # time limit


def read_command_line(argv: list[str]) -> CommandLine:
    """Read the options of a launch, those of the doctor among them, and perhaps a script.

    Raises:
        ConfigurationError: an option is unknown, or not allowed.
    """
    end = find_script(argv, also=("--timeout",))
    options = unwrap_lists(vars(build_parser().parse_args([word for word in argv[:end] if word != "--"])))
    return CommandLine(options, argv[end:], options.pop("timeout"))


def build_parser() -> argparse.ArgumentParser:
    """Return the parser: the options of ``accel launch``, its help limited to those that matter, and a time limit."""
    parser = ConfigParser(
        prog="accel doctor",
        usage="accel doctor [options] [script [script arguments]]",
        description="Check this machine, or all machines of a cluster together.",
        epilog=_EPILOG,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    text = f"time limit for the multi-process checks (default: {DEFAULT_SECONDS:.0f})"
    parser.add_argument("--timeout", type=_seconds, default=DEFAULT_SECONDS, metavar="SECONDS", help=text)
    for group in load_groups():
        group.add_to_parser(parser)
    for action in parser._actions:
        if action.dest not in (*_OPTIONS, "ft", "timeout", "help"):
            action.help = argparse.SUPPRESS
    for section in parser._action_groups:
        if all(action.help is argparse.SUPPRESS for action in section._group_actions):
            section.title = section.description = None
    return parser


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of seconds")
    return value


def _results(command_line: CommandLine) -> Iterator[Any]:
    from ..doctor.group import check_group
    from ..doctor.machine import CHECKS, check_torchft
    from ..doctor.result import run_check

    arguments = command_line.options
    settings = load_settings(arguments)
    for subject, check in (*CHECKS, *((("torchft", check_torchft),) if settings["ft"] else ())):
        yield from run_check(subject, check)
    options = [f"--{name}={value}" for name, value in arguments.items() if name in _OPTIONS]
    options += _default_options(settings, arguments)
    facts = facts_of(settings, command_line.script)
    yield from check_group(options, os.environ, command_line.seconds, facts)


def facts_of(settings: Resolution, script: list[str]) -> dict[str, str]:
    """Return what the machines must agree on to start this script, or no script, with these settings."""
    from ..launch_plan import make_plan
    from ..network.agreement import facts_of_plan

    if int(settings["num_machines"]) == 1:
        return {}
    # Any file is a script for the plan; without one all machines compare this.
    facts = facts_of_plan(make_plan(settings, *((script[0], script[1:]) if script else (__file__, []))))
    return {name: value for name, value in facts.items() if script or "script" not in name}


def _default_options(settings: Any, arguments: dict[str, Any]) -> list[str]:
    """On one machine with less than two devices, two processes on the CPU: collectives need at least two."""
    from ..accelerators.registry import find_visible
    from ..launch_context import Role, detect_context

    alone = detect_context(settings, os.environ).role is Role.ALONE and settings["num_machines"] == 1
    if not alone or settings["num_processes"] is not None or find_visible(os.environ).count > 1:
        return []
    return ["--num_processes=2", *([] if "cpu" in arguments else ["--cpu"])]


COMMAND = Command("check this machine, or a cluster, and advise on every problem", run)

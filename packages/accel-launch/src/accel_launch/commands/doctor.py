"""``accel doctor``: checks this machine, or a cluster, and advises on every problem."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from typing import Any

from accel_state.command import Command
from accel_state.options import load_groups

from ..config.read import load_settings
from ..parser import ConfigParser

DEFAULT_SECONDS = 25.0
_RENDEZVOUS = ("main_process_ip", "main_process_port", "rdzv_backend", "rdzv_conf")
_OPTIONS = ("cpu", "num_processes", "num_machines", "machine_rank", *_RENDEZVOUS)
_EPILOG = """\
On a cluster, run it on every machine with the same options as `accel launch`, or once inside a SLURM job: the network
between the machines is checked too. The exit code is 0 if all checks passed, else 1.
"""


def run(argv: list[str]) -> int:
    """Print a line for each check, and return 0 if none failed, else 1.

    Raises:
        ConfigurationError: an option is not allowed.
    """
    arguments = vars(build_parser().parse_args(argv))
    seconds = arguments.pop("timeout")
    begin = time.monotonic()
    failed = 0
    for result in _results(arguments, seconds):
        failed += result.failed
        print(result.line(), flush=True)
    verdict = f"{failed} check{'' if failed == 1 else 's'} failed" if failed else "all checks passed"
    print(f"\n{verdict} ({time.monotonic() - begin:.1f} s)")
    return 1 if failed else 0


def build_parser() -> argparse.ArgumentParser:
    """The parser: the options of ``accel launch`` that matter here, and a time limit."""
    parser = ConfigParser(
        prog="accel doctor",
        description="Check this machine, or all machines of a cluster together.",
        epilog=_EPILOG,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    text = "time limit for the multi-process checks (default: 25)"
    parser.add_argument("--timeout", type=_seconds, default=DEFAULT_SECONDS, metavar="SECONDS", help=text)
    for group in load_groups():
        for option in (option for option in group.options() if option.name in _OPTIONS):
            nargs: dict[str, Any] = {"nargs": "?", "const": "true"} if option.is_flag else {}
            parser.add_argument(
                *option.flags, dest=option.name, default=argparse.SUPPRESS, metavar="VALUE", help=option.help, **nargs
            )
    return parser


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of seconds")
    return value


def _results(arguments: dict[str, Any], seconds: float) -> Iterator[Any]:
    from ..doctor.group import check_group
    from ..doctor.machine import CHECKS
    from ..doctor.result import run_check

    settings = load_settings(arguments)
    for subject, check in CHECKS:
        yield from run_check(subject, check)
    options = [f"--{name}={value}" for name, value in arguments.items()]
    yield from check_group([*options, *_default_options(settings, arguments)], os.environ, seconds)


def _default_options(settings: Any, arguments: dict[str, Any]) -> list[str]:
    """On one machine with less than two devices, two processes on the CPU: collectives need at least two."""
    from ..accelerators.registry import find_visible
    from ..launch_context import Role, detect_context

    alone = detect_context(settings, os.environ).role is Role.ALONE and settings["num_machines"] == 1
    if not alone or settings["num_processes"] is not None or find_visible(os.environ).count > 1:
        return []
    return ["--num_processes=2", *([] if "cpu" in arguments else ["--cpu"])]


COMMAND = Command("check this machine, or a cluster, and advise on every problem", run)

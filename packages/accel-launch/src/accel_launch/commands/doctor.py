"""``accel doctor``: what works on this machine, or on a cluster, and what to do about what does not."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator, Sequence
from typing import Any

from accel_state.options import load_groups

from ..config.read import load_settings
from ..parser import ConfigParser
from .base import Command

DEFAULT_SECONDS = 25.0
_OPTIONS = (
    "cpu",
    "num_processes",
    "num_machines",
    "machine_rank",
    "main_process_ip",
    "main_process_port",
    "rdzv_backend",
    "rdzv_conf",
)
_EPILOG = """\
On a cluster, run it on every machine with the options that `accel launch` would get, or once inside a SLURM job: the machines then also
check one another. The exit code is 0 where everything works, 1 where something does not.
"""


def run(argv: list[str]) -> int:
    """Check, print a line for each finding, and return 0 or 1.

    Raises:
        ConfigurationError: an option is not allowed.
    """
    arguments = vars(build_parser().parse_args(argv))
    seconds = arguments.pop("timeout")
    begin = time.monotonic()
    failed = 0
    for finding in _findings(arguments, seconds):
        failed += finding.failed
        print(finding.line(), flush=True)
    took = time.monotonic() - begin
    print(f"\n{'everything works' if not failed else f'{failed} thing(s) to mend'} ({took:.1f} s)")
    return 1 if failed else 0


def build_parser() -> argparse.ArgumentParser:
    """The parser: some options of ``accel launch``, and a time limit."""
    parser = ConfigParser(
        prog="accel doctor",
        description="Check this machine, and with several machines all of them together.",
        epilog=_EPILOG,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--timeout",
        type=_seconds,
        default=DEFAULT_SECONDS,
        metavar="SECONDS",
        help="time that the processes may take (default 25)",
    )
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
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return value


def _findings(arguments: dict[str, Any], seconds: float) -> Iterator[Any]:
    from ..doctor.group import check_group
    from ..doctor.machine import CHECKS
    from ..doctor.result import run_check

    settings = load_settings(arguments)
    for subject, check in CHECKS:
        yield from run_check(subject, check)
    words = [f"--{name}={value}" for name, value in arguments.items()]
    yield from check_group([*words, *_defaults(settings, arguments)], os.environ, seconds)


def _defaults(settings: Any, arguments: dict[str, Any]) -> Sequence[str]:
    """On one machine without two devices, two processes on the CPU: one alone would have nobody to talk to."""
    from ..accelerators.registry import find_visible
    from ..launch_context import Role, find_place

    alone = find_place(settings, os.environ).role is Role.ALONE and settings["num_machines"] == 1
    if not alone or settings["num_processes"] is not None or find_visible(os.environ).count > 1:
        return []
    return ["--num_processes=2", *([] if "cpu" in arguments else ["--cpu"])]


COMMAND = Command("check this machine, or a cluster, and say what to do about what does not work", run)

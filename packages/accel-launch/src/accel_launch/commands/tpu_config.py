"""``accel tpu-config``: run commands on every machine of a TPU pod."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path

from accel_state.errors import ConfigurationError

from ..cloud.gcloud import run_all, ssh_commands
from ..config.read import load_settings
from ..parser import ConfigParser
from .base import Command


def run(argv: list[str]) -> int:
    """Run the commands of the command line and of the configuration file.

    Raises:
        ConfigurationError: there is no command, or no name or zone of a TPU.
    """
    arguments = build_parser().parse_args(argv)
    names = ("config_file", "tpu_name", "tpu_zone", "vm")
    given = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    settings = load_settings(given)
    commands = _commands(arguments, settings["command"], settings["command_file"])
    line = "; ".join(commands)
    calls = ssh_commands(settings["tpu_name"], settings["tpu_zone"], line, settings["vm"], arguments.use_alpha)
    if arguments.debug:
        for call in calls:
            print(f"Running {shlex.join(call)}")
        return 0
    code = run_all(calls)
    if not code:
        print("The commands have run on every machine of the pod.")
    return code


def build_parser() -> argparse.ArgumentParser:
    """The parser."""
    parser = ConfigParser(
        prog="accel tpu-config", description="Run commands on every machine of a TPU pod, over gcloud."
    )
    pod = parser.add_argument_group("pod", "Left out, the configuration file says it.")
    pod.add_argument("--config_file", "--config-file", metavar="FILE", help="configuration file to read")
    pod.add_argument("--tpu_name", "--tpu-name", metavar="NAME", help="name of the TPU")
    pod.add_argument("--tpu_zone", "--tpu-zone", metavar="ZONE", help="zone that it is in")
    pod.add_argument(
        "--vm",
        action="append",
        metavar="NAME",
        help="name of a single machine, instead of all; may be given several times",
    )
    what = parser.add_argument_group("commands")
    what.add_argument("--use_alpha", "--use-alpha", action="store_true", help="use `gcloud alpha`")
    what.add_argument("--command_file", "--command-file", metavar="FILE", help="file with commands, one on a line")
    what.add_argument(
        "--command", action="append", nargs="+", metavar="COMMAND", help="a command; may be given several times"
    )
    what.add_argument(
        "--install_accel",
        "--install-accel",
        "--install_accelerate",
        "--install-accelerate",
        action="store_true",
        help="install accel first",
    )
    what.add_argument(
        "--accel_version",
        "--accel-version",
        "--accelerate_version",
        "--accelerate-version",
        default=None,
        metavar="VERSION",
        help="version to install",
    )
    what.add_argument("--debug", action="store_true", help="print what would be run, and run nothing")
    return parser


def _commands(arguments: argparse.Namespace, configured: Sequence[str], configured_file: str | None) -> list[str]:
    """What to run, in order: cd, the installation, then the commands."""
    typed = [" ".join(words) for words in arguments.command or ()]
    file = arguments.command_file or (None if typed else configured_file)
    found = [*(_read(file) if file else ()), *(typed or ([] if file else configured))]
    install = [_install(arguments.accel_version)] if arguments.install_accel else []
    if not found and not install:
        raise ConfigurationError(
            "no command is given. Give --command, --command_file or --install_accel, or `commands` in the "
            "configuration file."
        )
    return ["cd /usr/share", *install, *found]


def _install(version: str | None) -> str:
    return "pip install -U accel" if version in (None, "latest") else f"pip install {shlex.quote(f'accel=={version}')}"


def _read(file: str) -> list[str]:
    try:
        lines = Path(file).expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f"--command_file {file!r} cannot be read: {getattr(error, 'strerror', None) or 'not UTF-8 text'}."
        ) from None
    return [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]


COMMAND = Command("run commands on every machine of a TPU pod", run)

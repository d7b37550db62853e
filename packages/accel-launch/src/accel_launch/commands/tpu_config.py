"""``accel tpu-config``: runs commands on every machine of a TPU pod."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path

from accel_state.command import Command
from accel_state.errors import ConfigurationError
from accel_state.secrets import hide_arguments

from ..cloud.gcloud import run_all, ssh_commands
from ..config.read import load_settings
from ..hostfile import read_lines
from ..parser import ConfigParser


def run(argv: list[str]) -> int:
    """Run the commands of the command line and of the configuration file.

    Raises:
        ConfigurationError: no command is given, or name or zone of the TPU are missing.
    """
    arguments = build_parser().parse_args(argv)
    names = ("config_file", "tpu_name", "tpu_zone", "vm")
    given = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    settings = load_settings(given)
    line = "; ".join(_commands(arguments, settings["command"], settings["command_file"]))
    calls = ssh_commands(settings["tpu_name"], settings["tpu_zone"], line, settings["vm"], arguments.use_alpha)
    if arguments.debug:
        for call in calls:
            print(f"Running {shlex.join(hide_arguments(call))}")
        return 0
    code = run_all(calls)
    if not code:
        print("The commands succeeded on every machine of the pod.")
    return code


def build_parser() -> argparse.ArgumentParser:
    """Return the parser."""
    parser = ConfigParser(prog="accel tpu-config", description="Run commands on all machines of a TPU pod with gcloud.")
    pod = parser.add_argument_group("pod", "Defaults come from the configuration file.")
    pod.add_argument("--config_file", "--config-file", metavar="FILE", help="configuration file to read")
    pod.add_argument("--tpu_name", "--tpu-name", metavar="NAME", help="name of the TPU")
    pod.add_argument("--tpu_zone", "--tpu-zone", metavar="ZONE", help="zone of the TPU")
    text = "name of one machine to use instead of all; may be repeated"
    pod.add_argument("--vm", action="append", metavar="NAME", help=text)
    group = parser.add_argument_group("commands")
    group.add_argument("--use_alpha", "--use-alpha", action="store_true", help="use `gcloud alpha`")
    group.add_argument("--command_file", "--command-file", metavar="FILE", help="file with one command on each line")
    text = "a command; may be repeated"
    group.add_argument("--command", action="append", nargs="+", metavar="COMMAND", help=text)
    flags = ("--install_accel", "--install-accel", "--install_accelerate", "--install-accelerate")
    group.add_argument(*flags, action="store_true", help="install accel before the commands")
    flags = ("--accel_version", "--accel-version", "--accelerate_version", "--accelerate-version")
    group.add_argument(*flags, metavar="VERSION", help="version of accel to install")
    group.add_argument("--debug", action="store_true", help="print the gcloud commands without running them")
    return parser


def _commands(arguments: argparse.Namespace, configured: Sequence[str], configured_file: str | None) -> list[str]:
    """Return the shell commands in order: cd, the installation, those of the file, those of the command line."""
    typed = [" ".join(words) for words in arguments.command or ()]
    file = arguments.command_file or (None if typed else configured_file)
    commands = _read(file) if file else []
    commands += typed or ([] if file else configured)
    install = [_install(arguments.accel_version)] if arguments.install_accel else []
    if not commands and not install:
        raise ConfigurationError(
            "no command is given. Give --command, --command_file or --install_accel, or set `commands` in the "
            "configuration file."
        )
    return ["cd /usr/share", *install, *commands]


def _install(version: str | None) -> str:
    return "pip install -U accel" if version in (None, "latest") else f"pip install {shlex.quote(f'accel=={version}')}"


def _read(file: str) -> list[str]:
    lines = read_lines(Path(file), f"--command_file {file!r}")
    return [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]


COMMAND = Command("run commands on every machine of a TPU pod", run)

"""The command ``accel test``. Imports no torch: the processes that it starts do."""

from __future__ import annotations

import argparse
import subprocess

from accel_launch.commands.base import Command
from accel_launch.interpreter import python_command
from accel_launch.parser import ConfigParser


def run(argv: list[str]) -> int:
    """Launch the self-test as the configuration says, and return its exit code.

    Raises:
        ConfigurationError: an option is not known.
    """
    arguments, options = build_parser().parse_known_args(argv)
    words = ["--config_file", arguments.config_file] if arguments.config_file else []
    # The launcher runs in a process of its own, since for a single process it becomes the script.
    code = subprocess.call(python_command("-m", "accel_launch", "launch", *words, *options, "-m", "accel.self_test"))
    if code == 0:
        print("The self-test passed: this machine is ready to train with this configuration.")
    return code if code >= 0 else 128 - code


def build_parser() -> argparse.ArgumentParser:
    """The parser; everything that it does not know goes to ``accel launch``."""
    parser = ConfigParser(
        prog="accel test",
        usage="accel test [--config_file FILE] [options of accel launch]",
        description="Run collectives, loaders, a training and a checkpoint on the processes that the configuration "
        "asks for, and compare "
        "the results with those of plain PyTorch in one process.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--config_file", "--config-file", metavar="FILE", help="configuration file to test; left out, the default one"
    )
    return parser


COMMAND = Command("test this machine with a short real run: collectives, loaders, training, checkpoint", run)

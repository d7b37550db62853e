"""The command ``accel test``. Does not import torch; the processes that it launches do."""

from __future__ import annotations

import argparse
import subprocess
from pathlib import Path

from accel_launch.entrypoint import python_command
from accel_launch.parser import ConfigParser, parse
from accel_state.command import Command
from accel_state.errors import ConfigurationError

_MODULE = "accel.self_test"


def run(argv: list[str]) -> int:
    """Launch the self-test with the given configuration, and return its exit code."""
    arguments, options = build_parser().parse_known_args(argv)
    script = parse([*options, "-m", _MODULE]).script
    if script != _MODULE:
        raise ConfigurationError(
            f"{script!r} is not an option: accel test runs its own script, with options of accel launch. Leave it "
            f"out, or run your script with: accel launch {script}"
        )
    own = [f"--device={arguments.device}"] if arguments.device else []
    if arguments.report:
        report = Path(arguments.report).absolute()
        if not report.parent.is_dir():
            raise ConfigurationError(f"--report {arguments.report}: there is no directory {report.parent}. Create it.")
        own.append(f"--report={report}")
    if arguments.device == "cpu":
        options.append("--cpu")
    config = ["--config_file", arguments.config_file] if arguments.config_file else []
    # A subprocess, because for a single process the launcher replaces itself by the script.
    code = subprocess.call(python_command("-m", "accel_launch", "launch", *config, *options, "-m", _MODULE, *own))
    if code == 0 and arguments.report:
        print(f"Wrote {arguments.report}.")
    if code == 0:
        print("The self-test passed: this machine is ready to train with this configuration.")
    return code if code >= 0 else 128 - code


def build_parser() -> argparse.ArgumentParser:
    """Return the parser; unknown options are passed to ``accel launch``."""
    parser = ConfigParser(
        prog="accel test",
        usage="accel test [--config_file FILE] [--device NAME] [--report FILE] [options of accel launch]",
        description="Run collectives, data loaders, training and a checkpoint on the configured processes, and compare "
        "the results with plain PyTorch in one process.",
        allow_abbrev=False,
    )
    text = "configuration file to test (default: the default configuration file)"
    parser.add_argument("--config_file", "--config-file", metavar="FILE", help=text)
    text = "check this device too, by its name in torch: memory, generators, autocast, copies, offloading, saves"
    parser.add_argument("--device", metavar="NAME", help=text)
    text = "write what passed into this file, as a row of docs/hardware.md"
    parser.add_argument("--report", metavar="FILE", help=text)
    return parser


COMMAND = Command("test this machine with a short run: collectives, data loaders, training, checkpoint", run)

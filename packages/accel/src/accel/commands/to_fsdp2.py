"""``accel to-fsdp2``: a configuration file of FSDP 1 as one of FSDP 2."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from accel_launch.commands.base import Command
from accel_launch.parser import ConfigParser, parse_options
from accel_state.errors import ConfigurationError


def run(argv: list[str]) -> int:
    """Convert, and say what was changed.

    Returns:
        0.

    Raises:
        ConfigurationError: the file is not one of FSDP, asks for what version 2 has not, or the target is there
            already.
    """
    options = parse_options(argv, _parser())
    source, target = (
        Path(os.path.expanduser(options.get(name, options["config_file"]))) for name in ("config_file", "output_file")
    )
    if not options.get("overwrite", False) and target.exists():
        raise ConfigurationError(
            f"{target} exists already. Name another file with --output_file, or give --overwrite to replace it."
            if "output_file" in options
            else f"{source} would be replaced. Name another file with --output_file, or give --overwrite."
        )
    from accel_launch.config.fsdp_version_2 import convert_file

    before = _stamp(target)
    for note in convert_file(source, target):
        print(note)
    if _stamp(target) != before:
        print(f"Configuration of FSDP 2 saved in {target}")
    return 0


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def _parser() -> ConfigParser:
    parser = ConfigParser(
        prog="accel to-fsdp2",
        description="Write a configuration file of FSDP 1 as one of FSDP 2. Each change is shown; comments stay.",
        allow_abbrev=False,
    )
    missing = argparse.SUPPRESS
    parser.add_argument("--config_file", "--config-file", required=True, metavar="FILE", help="the file to convert")
    parser.add_argument(
        "--output_file", "--output-file", default=missing, metavar="FILE", help="the file to write (default: the same)"
    )
    parser.add_argument("--overwrite", action="store_true", default=missing, help="replace the file that is there")
    return parser


COMMAND = Command("convert a configuration file from FSDP 1 to FSDP 2", run)

"""``accel to-fsdp2``: converts a configuration file from FSDP 1 to FSDP 2."""

from __future__ import annotations

import argparse
from pathlib import Path

from accel_launch.parser import ConfigParser, parse_options
from accel_state.command import Command
from accel_state.errors import ConfigurationError


def run(argv: list[str]) -> int:
    """Convert a file, print what was changed, and return 0."""
    options = parse_options(argv, build_parser())
    source = Path(options["config_file"]).expanduser()
    target = Path(options.get("output_file", source)).expanduser()
    if "overwrite" not in options and target.exists():
        problem = f"{target} exists already" if "output_file" in options else f"{source} would be replaced"
        raise ConfigurationError(f"{problem}. Name another file with --output_file, or give --overwrite.")
    from accel_launch.config.fsdp_version_2 import convert_file

    before = target.read_bytes() if target.exists() else None
    for note in convert_file(source, target):
        print(note)
    if target.exists() and target.read_bytes() != before:
        print(f"Configuration of FSDP 2 saved in {target}")
    return 0


def build_parser() -> ConfigParser:
    """Return the parser."""
    parser = ConfigParser(
        prog="accel to-fsdp2",
        description="Convert a configuration file from FSDP 1 to FSDP 2. Prints each change.",
        allow_abbrev=False,
    )
    parser.add_argument("--config_file", "--config-file", required=True, metavar="FILE", help="file to convert")
    text = "file to write (default: the converted file)"
    parser.add_argument("--output_file", "--output-file", default=argparse.SUPPRESS, metavar="FILE", help=text)
    parser.add_argument("--overwrite", action="store_true", default=argparse.SUPPRESS, help="replace an existing file")
    return parser


COMMAND = Command("convert a configuration file from FSDP 1 to FSDP 2", run)

"""``accel checkpoint``: lists checkpoints, verifies their files, and removes leftovers. Torch-free."""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict

from accel_state.command import Command
from accel_state.errors import AccelError, ConfigurationError
from accel_state.humanize import convert_bytes
from accel_state.paths import as_location
from accel_state.storage.url import Location, RemotePath

from ..atomic_dir import remove_leftovers
from ..catalog import CheckpointInfo, list_checkpoints, remote, verified, why_no_checkpoint
from ..names import MANIFEST_NAME, CheckpointError

EXIT_DAMAGED = 1
_AGE_UNITS = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"), (0.0, "s"))


def run(argv: list[str]) -> int:
    """Run ``accel checkpoint list``, ``verify`` or ``clean``."""
    options = _parser().parse_args(argv)
    directory = as_location("PATH", options.path)
    reason = None if options.action is _clean else why_no_checkpoint(directory)
    is_missing = not isinstance(directory, RemotePath) and not directory.is_dir()
    if reason is not None and (options.action is _verify or is_missing):
        raise ConfigurationError(reason)
    code: int = options.action(directory, options.json)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "accel checkpoint", description="List, verify and clean the checkpoints of save_state."
    )
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    text = "show step, size, age and completeness of the checkpoints in a directory"
    list_parser = actions.add_parser("list", help=text, description=f"{text.capitalize()}.")
    list_parser.add_argument("path", metavar="DIR", help="a directory of checkpoints, or its URL")
    list_parser.set_defaults(action=_list)
    text = "compare every file of a checkpoint with the digest in its manifest"
    verify_parser = actions.add_parser("verify", help=text, description=f"{text.capitalize()}.")
    verify_parser.add_argument("path", metavar="PATH", help="a checkpoint, or its URL")
    verify_parser.set_defaults(action=_verify)
    text = "delete what killed processes have left: unfinished saves, and unfinished uploads to object storage"
    clean_parser = actions.add_parser("clean", help=text, description=f"{text.capitalize()}.")
    clean_parser.add_argument("path", metavar="DIR", help="a directory of checkpoints, or its URL")
    clean_parser.set_defaults(action=_clean)
    for action in (list_parser, verify_parser, clean_parser):
        action.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _list(directory: Location, as_json: bool) -> int:
    checkpoints = list_checkpoints(directory)
    if as_json:
        entries = [
            {**asdict(info), "path": str(info.path), "name": info.path.name, "age": _age(info)} for info in checkpoints
        ]
        print(json.dumps(entries, indent=2))
        return 0
    if not checkpoints:
        if why_no_checkpoint(directory) is None:
            raise ConfigurationError(
                f"{_shown(directory)} is a checkpoint itself. Give the directory that contains it, or check its "
                "files with `accel checkpoint verify`."
            )
        raise ConfigurationError(
            f"{_shown(directory)} contains no checkpoint. Give the directory of those that save_state has written, "
            "or the project directory."
        )
    rows = [("NAME", "STEP", "SIZE", "AGE", "PROCESSES", "STATE"), *map(_row, checkpoints)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())
    return 0


def _shown(directory: Location) -> str:
    return str(directory if isinstance(directory, RemotePath) else directory.resolve())


def _clean(directory: Location, as_json: bool) -> int:
    if isinstance(directory, RemotePath):
        count = remote().clean_all(directory)
    else:
        if not directory.is_dir():
            raise ConfigurationError(f"{directory} is not a directory. Give a directory of checkpoints, or its URL.")
        count = sum(remove_leftovers(parent) for parent in (directory, directory / "checkpoints") if parent.is_dir())
    print(
        json.dumps({"path": str(directory), "removed": count}) if as_json else f"{directory}: removed {count} leftovers"
    )
    return 0


def _age(info: CheckpointInfo) -> float:
    return max(0.0, round(time.time() - info.saved, 1))


def _row(info: CheckpointInfo) -> tuple[str, ...]:
    age = _age(info)
    seconds, unit = next(pair for pair in _AGE_UNITS if age >= pair[0])
    step, processes = ("?" if value is None else str(value) for value in (info.optimizer_steps, info.world_size))
    state = "complete" if info.complete else f"incomplete: {info.problem}"
    return info.path.name, step, convert_bytes(info.size), f"{age / (seconds or 1):.0f} {unit}", processes, state


def _verify(directory: Location, as_json: bool) -> int:
    number = 0
    problems: dict[str, str] = {}
    try:
        number, problems = verified(directory)
    except CheckpointError as error:
        problems = {MANIFEST_NAME: str(error)}
    if as_json:
        print(json.dumps({"path": str(directory), "files": number, "damaged": problems}, indent=2))
    elif problems:
        for name, problem in problems.items():
            print(f"{directory}/{name}: {problem}", file=sys.stderr)
    else:
        print(f"{directory}: all {number} files are intact")
    return EXIT_DAMAGED if problems else 0


def main() -> int:
    """Run as ``python -m accel_checkpoint``; prints an expected error as one line and returns exit code 2."""
    try:
        return run(sys.argv[1:])
    except AccelError as error:
        print(f"accel checkpoint: error: {error}", file=sys.stderr)
        return 2


COMMAND = Command("list checkpoints, verify that their files are intact, and clean up after killed saves", run)

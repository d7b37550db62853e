"""``accel checkpoint``: what checkpoints there are, and whether they are as they were written. Torch-free."""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from accel_launch.commands.base import Command
from accel_state.errors import ConfigurationError
from accel_state.humanize import convert_bytes

from ..checkpoint.catalog import CheckpointInfo, list_checkpoints
from ..checkpoint.manifest import Manifest, damaged_files
from ..checkpoint.names import MANIFEST_NAME, CheckpointError

DAMAGED = 1
_AGES = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"))


def run(argv: list[str]) -> int:
    """Run ``accel checkpoint list`` or ``accel checkpoint verify``.

    Returns:
        0; or 1 if ``verify`` has found damage.

    Raises:
        ConfigurationError: there is no such folder, or no checkpoint in it.
    """
    options = _parser().parse_args(argv)
    folder = Path(options.path)
    if not folder.is_dir():
        raise ConfigurationError(
            f"{folder} is no folder. Give one that save_state has written (verify), or one of checkpoints (list)."
        )
    code: int = options.action(folder, options.json)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "accel checkpoint", description="Look after checkpoints that save_state has written."
    )
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    for name, action, what, words in (
        (
            "list",
            _list,
            "a folder of checkpoints",
            "show step, size, age and completeness of the checkpoints in a folder",
        ),
        ("verify", _verify, "a checkpoint", "compare every file of a checkpoint with the digest it was written with"),
    ):
        one = actions.add_parser(name, help=words, description=f"{words[0].upper()}{words[1:]}.")
        one.add_argument("path", metavar="DIR" if name == "list" else "PATH", help=what)
        one.add_argument("--json", action="store_true", help="print JSON")
        one.set_defaults(action=action)
    return parser


def _list(folder: Path, as_json: bool) -> int:
    found = list_checkpoints(folder)
    if as_json:
        print(json.dumps([_as_json(info) for info in found], indent=2))
        return 0
    if not found:
        raise ConfigurationError(
            f"there is no checkpoint in {folder}. Give the folder that save_state writes to, or the project's."
        )
    rows = [("NAME", "STEP", "SIZE", "AGE", "PROCESSES", "STATE"), *(_row(info) for info in found)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())
    return 0


def _as_json(info: CheckpointInfo) -> dict[str, Any]:
    return {**asdict(info), "path": str(info.path), "name": info.path.name, "age": _age(info)}


def _age(info: CheckpointInfo) -> float:
    return max(0.0, round(time.time() - info.saved, 1))


def _row(info: CheckpointInfo) -> tuple[str, ...]:
    step, processes = ("?" if value is None else str(value) for value in (info.optimizer_steps, info.world_size))
    state = "complete" if info.complete else f"incomplete: {info.problem}"
    return info.path.name, step, convert_bytes(info.size), _in_words(_age(info)), processes, state


def _in_words(seconds: float) -> str:
    unit, name = next(((unit, name) for unit, name in _AGES if seconds >= unit), (1.0, "s"))
    return f"{seconds / unit:.0f} {name}"


def _verify(folder: Path, as_json: bool) -> int:
    problems, number = _problems(folder)
    if as_json:
        print(json.dumps({"path": str(folder), "files": number, "damaged": problems}, indent=2))
    elif problems:
        for name, problem in problems.items():
            print(f"{folder / name}: {problem}", file=sys.stderr)
    else:
        print(f"{folder}: {number} files are as they were written")
    return DAMAGED if problems else 0


def _problems(folder: Path) -> tuple[dict[str, str], int]:
    try:
        manifest = Manifest.read(folder)
    except CheckpointError as error:
        return {MANIFEST_NAME: str(error)}, 0
    if manifest is None:
        words = (
            "missing: the checkpoint is not whole, or another library has saved it, so there is nothing to "
            "compare its files with"
        )
        return {MANIFEST_NAME: words}, 0
    return damaged_files(manifest, folder), len(manifest.files)


COMMAND = Command("list checkpoints, and verify that they are as they were written", run)

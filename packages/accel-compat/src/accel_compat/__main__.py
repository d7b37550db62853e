"""``python -m accel_compat enable | disable | status``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from . import environment


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    parser = argparse.ArgumentParser(
        "python -m accel_compat", description="Make `import accelerate` give accel in this Python environment."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("enable", help="from now on, libraries that import accelerate get accel")
    commands.add_parser("disable", help="remove what enable wrote")
    commands.add_parser("status", help="say which accelerate this environment imports")
    command = parser.parse_args(argv).command
    try:
        changed = {"enable": environment.enable, "disable": environment.disable, "status": list}[command]()
    except environment.RefusedError as error:
        print(error, file=sys.stderr)
        return 1
    for path in changed:
        print(f"{'wrote' if command == 'enable' else 'removed'} {path}")
    print(environment.describe())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

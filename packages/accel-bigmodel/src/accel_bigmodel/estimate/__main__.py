"""``python -m accel_bigmodel.estimate``: the command, where the launcher is not installed."""

from __future__ import annotations

import sys

from accel_state.errors import ConfigurationError, MissingDependencyError

from .command import run

PROGRAM = "python -m accel_bigmodel.estimate"


def main() -> int:
    """Run the command; a wrong argument becomes one line on stderr and the exit code 2."""
    try:
        return run(sys.argv[1:], PROGRAM)
    except (ConfigurationError, MissingDependencyError) as error:
        print(f"{PROGRAM}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())

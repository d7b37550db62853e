"""``python -m accel_bigmodel.estimate``: the command without the launcher."""

from __future__ import annotations

import sys

from accel_state.errors import ConfigurationError, MissingDependencyError

from .command import run

PROGRAM = "python -m accel_bigmodel.estimate"


def main() -> int:
    """Run the command; configuration errors become one line on stderr and exit code 2."""
    try:
        return run(sys.argv[1:], PROGRAM)
    except (ConfigurationError, MissingDependencyError) as error:
        print(f"{PROGRAM}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())

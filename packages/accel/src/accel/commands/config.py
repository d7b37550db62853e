"""``accel config``, under the module path that other libraries know: ``python -m accel.commands.config``."""

from __future__ import annotations

from accel_launch.cli import config_main as main

if __name__ == "__main__":
    raise SystemExit(main())

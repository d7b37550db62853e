"""``accel env``, under the module path that other libraries know: ``python -m accel.commands.env``."""

from __future__ import annotations

from accel_launch.cli import env_main as main

if __name__ == "__main__":
    raise SystemExit(main())

"""``accel launch``, under the module path that other libraries know: ``python -m accel.commands.launch``."""

from __future__ import annotations

from accel_launch.api import launch_command as launch_command
from accel_launch.api import launch_command_parser as launch_command_parser
from accel_launch.cli import launch_main as main

if __name__ == "__main__":
    raise SystemExit(main())

"""``python -m accel.commands.config``."""

from accel_launch.cli import config_main

raise SystemExit(config_main())

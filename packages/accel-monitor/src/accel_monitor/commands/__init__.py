"""The subcommands ``accel monitor`` and ``accel goodput``."""

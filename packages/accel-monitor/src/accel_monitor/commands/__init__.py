"""The subcommand ``accel goodput``."""

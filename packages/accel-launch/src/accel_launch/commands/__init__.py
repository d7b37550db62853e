"""The subcommands of ``accel``, one file each."""

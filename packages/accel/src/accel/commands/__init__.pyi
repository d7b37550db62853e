"""The command line, under the module path that other libraries know."""

from accel_launch.cli import main as main

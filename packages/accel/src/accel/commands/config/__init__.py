"""``accel config``, under the module path that other libraries know: ``python -m accel.commands.config``."""

from __future__ import annotations

from accel_launch.cli import config_main as main  # noqa: F401
from accel_launch.config.update import load_config_from_file as load_config_from_file
from accel_state.options import default_path, find_default

default_config_file: str = str(find_default() or default_path())
"""The configuration file that ``accel launch`` reads; without one, where ``accel config`` writes it."""

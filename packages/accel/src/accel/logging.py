"""Logging for many processes, under the module path that other libraries know."""

from accel_state.logging import MultiProcessAdapter as MultiProcessAdapter
from accel_state.logging import get_logger as get_logger

"""Formatted tracebacks, under the module path that other libraries know."""

from accel_state.imports import is_rich_available as is_rich_available

"""Launching, under the module path that other libraries know."""

from accel_state._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)

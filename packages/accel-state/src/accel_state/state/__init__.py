"""The shared states: rank and device, precision and plugins, gradient accumulation."""

from accel_state._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)

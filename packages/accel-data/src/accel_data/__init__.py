"""Shard any PyTorch data loader over processes, and resume it exactly."""

from accel_state._lazy import attach

__version__ = "1.0.0"

__getattr__, __dir__, __all__ = attach(__name__)

"""Save and resume any training loop: crash-safe, verified, without running code from files."""

from accel_state._lazy import attach

__version__ = "1.0.0"

__getattr__, __dir__, __all__ = attach(__name__)

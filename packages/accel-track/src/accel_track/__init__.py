"""Log experiments of distributed runs to any tracker, without blocking or stopping the run."""

from accel_state._lazy import attach

__version__ = "1.0.0"

__getattr__, __dir__, __all__ = attach(__name__)

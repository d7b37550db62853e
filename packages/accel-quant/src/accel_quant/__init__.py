"""Run a PyTorch model quantized to 8 or 4 bits."""

from accel_state._lazy import attach

__version__ = "1.0.0"

__getattr__, __dir__, __all__ = attach(__name__)

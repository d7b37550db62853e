"""What a training run does, and what its time was spent on, measured on every rank."""

from accel_state._lazy import attach as _attach_exports

__version__ = "1.0.0"

__getattr__, __dir__, __all__ = _attach_exports(__name__)

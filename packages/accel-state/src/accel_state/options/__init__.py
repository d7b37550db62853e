"""Launch options, each declared once. Torch-free."""

from accel_state._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)

"""How much memory a model needs, to be loaded and to be trained on one or several processes."""

from accel_state._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)

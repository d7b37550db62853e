"""How much memory a model needs: to hold it, and to train it on one process or several."""

from accel_state._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)

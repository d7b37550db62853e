"""accel-launch: start a script on one or many processes and machines. Importing this package does not import torch."""

from accel_state._lazy import attach

__version__ = "1.0.0"

__getattr__, __dir__, __all__ = attach(__name__)

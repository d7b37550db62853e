"""Environments: the launcher of this process, and its rank. Torch-free; one file per launcher."""

from accel_state._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)

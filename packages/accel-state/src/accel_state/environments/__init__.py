"""Environments: who started this process, and which rank it has. Torch-free; one file for each launcher."""

from accel_state._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)

"""Devices: what torch can compute on. One file for each; no other code of accel names a vendor."""

from accel_state._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)

"""The shared states: what this process is in the run, how it computes, and where its gradients stand."""

from accel_state._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)

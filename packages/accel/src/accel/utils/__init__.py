"""Helpers, under the module path that other libraries know."""

from accel_state._lazy import attach

from ..core.deferred import without_missing_extras

__getattr__, __dir__, _names = attach(__name__)
__all__ = without_missing_extras(_names)

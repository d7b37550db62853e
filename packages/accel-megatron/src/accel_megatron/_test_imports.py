"""For ``accel_state.testing.preload``: Megatron-core as ranks of tests import it. This package does not import it."""

from __future__ import annotations

from importlib.util import find_spec

from .testing import import_core

if find_spec("megatron") is not None:
    import_core()

"""Models bigger than memory, under the module path that other libraries know.

Libraries replace a function of this module and then call another: Transformers replaces ``check_device_map`` before it
calls ``dispatch_model``. So a function that is assigned here replaces the one that accel_bigmodel calls, too.
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import Any

from accel_state._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)


class _WritesThrough(types.ModuleType):
    def __setattr__(self, name: str, value: Any) -> None:
        implementation = importlib.import_module("accel_bigmodel.dispatch")
        if name in __all__ and hasattr(implementation, name):
            setattr(implementation, name, value)
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _WritesThrough

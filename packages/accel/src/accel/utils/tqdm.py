"""Progress bars, under the module path that other libraries know."""

from __future__ import annotations

import sys
import types
from typing import Any

from accel_state.logging import tqdm as tqdm


class _CallableModule(types.ModuleType):
    """The module, which stays usable as the function that ``accel.utils.tqdm`` is before this module is imported."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return tqdm(*args, **kwargs)


__wrapped__ = tqdm  # for inspect.signature
sys.modules[__name__].__class__ = _CallableModule

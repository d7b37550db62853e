"""A block without garbage collection, for work that makes millions of objects that all stay."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_open_blocks = 0
_was_enabled = False


@contextmanager
def without_collection() -> Iterator[None]:
    """Hold off garbage collection, which costs several times the work itself. Blocks may overlap between threads."""
    global _open_blocks, _was_enabled
    with _lock:
        if _open_blocks == 0:
            _was_enabled = gc.isenabled()
            gc.disable()
        _open_blocks += 1
    try:
        yield
    finally:
        with _lock:
            _open_blocks -= 1
            if _open_blocks == 0 and _was_enabled:
                gc.enable()

"""The end of a script that does not finish its runs itself."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
from typing import Any

logger = logging.getLogger(__name__)

# In the order of their beginning; a run must be delivered although nobody holds its object any more.
_open: dict[int, Any] = {}
_registered_in: list[int] = []


def remember(tracking: Any) -> None:
    """Have a run finished at the end of this process, if nobody does it before."""
    _open[id(tracking)] = tracking
    if os.getpid() not in _registered_in:
        _registered_in.append(os.getpid())
        # Before the interpreter joins its threads and calls what libraries have registered with atexit, which is when
        # they close # themselves. It is called in processes of multiprocessing too, where atexit is not. Without it,
        # atexit comes nearest.
        getattr(threading, "_register_atexit", atexit.register)(_finish_all)


def forget(tracking: Any) -> None:
    """A run has been finished."""
    _open.pop(id(tracking), None)


def _finish_all() -> None:
    """Finish the runs of this process; not those that a forked process has a copy of."""
    failed = getattr(sys, "last_value", None) is not None
    for tracking in list(_open.values()):
        if tracking._pid == os.getpid():
            try:
                tracking.finish(failed=failed)
            except Exception as error:
                logger.error("%s", error)

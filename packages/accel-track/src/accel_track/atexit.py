"""Finishes runs at the end of scripts that do not do so themselves."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
from typing import Any

logger = logging.getLogger(__name__)

# In the order of their start. The references keep a run alive whose object the script has dropped.
_open: dict[int, Any] = {}
_registered_in: list[int] = []


def register(run: Any) -> None:
    """Finish ``run`` at the end of this process, unless it is finished before."""
    _open[id(run)] = run
    if os.getpid() not in _registered_in:
        _registered_in.append(os.getpid())
        # Called before the interpreter joins its threads and runs atexit callbacks, in which libraries close
        # themselves, and also in multiprocessing children, where atexit callbacks do not run.
        getattr(threading, "_register_atexit", atexit.register)(_finish_all)


def unregister(run: Any) -> None:
    """Forget a run that was finished."""
    _open.pop(id(run), None)


def _finish_all() -> None:
    """Finish the runs of this process, but not copies inherited by a fork."""
    failed = getattr(sys, "last_value", None) is not None
    for run in list(_open.values()):
        if run.owner_pid == os.getpid():
            try:
                run.finish(failed=failed)
            except Exception as error:
                logger.error("%s", error)

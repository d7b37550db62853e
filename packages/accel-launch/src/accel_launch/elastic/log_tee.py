"""Output of ranks that goes to files and to the screen (``--tee``): to its last line.

torch's thread that copies a rank's file to the screen ends when it has come to the end of the file, and then finds that
the rank has ended. What the rank has written between the two is lost.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from torch.distributed.elastic.multiprocessing import api as torch_processes
from torch.distributed.elastic.multiprocessing.tail_log import TailLog


class _Finished(threading.Event):
    """That a rank has ended, said at the second look: between the two the thread reads its file once more."""

    def __init__(self) -> None:
        super().__init__()
        self._was_seen = False

    def is_set(self) -> bool:
        was_seen, self._was_seen = self._was_seen, super().is_set()
        return was_seen


class WholeTailLog(TailLog):
    """torch's, without that gap."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._finished_events = {local_rank: _Finished() for local_rank in self._finished_events}


@contextlib.contextmanager
def whole_output() -> Iterator[None]:
    """Ranks that torch's agent starts meanwhile are copied whole."""
    torchs, torch_processes.TailLog = torch_processes.TailLog, WholeTailLog  # type: ignore[misc]
    try:
        yield
    finally:
        torch_processes.TailLog = torchs  # type: ignore[misc]

"""Progress bars for long loads."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

from accel_state import is_initialized, is_tqdm_available

T = TypeVar("T")
# Seconds; shorter loads show no bar.
_DELAY = 1.0


def progress(items: Sequence[T], description: str) -> Iterable[T]:
    """The items, with a progress bar on each node's main process once iterating takes longer than a second."""
    if len(items) < 2 or not is_tqdm_available():
        return items
    # Constructing a state could start process groups, so only an existing one is asked.
    if is_initialized():
        from accel_state import PartialState

        if not PartialState().is_local_main_process:
            return items
    from tqdm.auto import tqdm

    bar: Iterable[T] = tqdm(items, desc=description, delay=_DELAY, leave=False)
    return bar

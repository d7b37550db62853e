"""Showing how far a long loading has come."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from accel_state import is_initialized, is_tqdm_available

T = TypeVar("T")
# Seconds. What takes less needs no bar.
_DELAY = 1.0


def progress(items: Sequence[T], description: str, **settings: Any) -> Iterable[T]:
    """The items, with a progress bar on the main process of each node once it takes longer than a second."""
    if len(items) < 2 or not is_tqdm_available() or not _shows():
        return items
    from tqdm.auto import tqdm

    bar: Iterable[T] = tqdm(items, desc=description, delay=_DELAY, leave=False, **settings)
    return bar


def _shows() -> bool:
    """Whether this process shows bars. A state is not made for it: that could start process groups."""
    if not is_initialized():
        return True
    from accel_state import PartialState

    return PartialState().is_local_main_process

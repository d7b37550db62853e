"""Letting every rank know when something failed on one of them, instead of waiting for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from accel_state.collectives.single import Collectives
from accel_state.errors import AccelError

from .checkpoint_files import CheckpointError


def on_all_ranks(collectives: Collectives, what: str, action: Callable[[], Any]) -> None:
    """Do something on this rank, and learn whether it went well on all of them.

    Args:
        collectives: of all ranks.
        what: for messages.
        action: what to do.

    Raises:
        CheckpointError: it failed on some rank; that rank's own error, if it is one of accel's.
    """
    error: Exception | None = None
    try:
        action()
    except Exception as raised:
        error = raised
    outcomes = collectives.all_gather_object(None if error is None else f"{type(error).__name__}: {error}")
    failed = {rank: outcome for rank, outcome in enumerate(outcomes) if outcome is not None}
    if isinstance(error, AccelError):
        raise error
    if failed:
        report = "; ".join(f"rank {rank}: {outcome}" for rank, outcome in failed.items())
        raise CheckpointError(f"{what} failed on {len(failed)} of {len(outcomes)} ranks. {report}") from error

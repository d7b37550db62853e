"""Machines that join a run and die soon after, over and over: each time all processes would be started again.

One whose launcher is started again and again, and is killed each time, for example for the memory that it takes, would
keep the run from training. Joins are not failures, so ``--max_restarts`` does not end that. Torch-free.
"""

from __future__ import annotations

import time

SHORT_SECONDS = 120.0
"""A machine that is gone so soon after it was taken in, without having left on a signal, had a short life."""
SHORT_LIVES = 3
"""After so many a machine is not taken in again for a while."""
HOLD_SECONDS = 600.0


class ShortLives:
    """The short lives of machines, as the launcher sees them that decides who takes part."""

    def __init__(self) -> None:
        self._taken_in: dict[str, float] = {}  # when, by id of the launcher
        self._ends: dict[str, list[float]] = {}  # of short lives, by name of the machine

    def begin(self, launcher: str) -> None:
        """Note that a launcher takes part."""
        self._taken_in.setdefault(launcher, time.monotonic())

    def end(self, launcher: str, name: str, *, left: bool) -> str:
        """Note that a launcher does not take part any more; what to say if its machine is held from now on, or empty.

        Args:
            launcher: its id; a second call for the same one does nothing.
            name: of its machine.
            left: whether it has left on a signal.
        """
        now, began = time.monotonic(), self._taken_in.pop(launcher, None)
        if began is None or left or now - began > SHORT_SECONDS:
            return ""
        self._ends.setdefault(name, []).append(now)
        return self.reason(name)

    def reason(self, name: str) -> str:
        """Why a machine is not taken in at this moment; empty if it may be."""
        now = time.monotonic()
        ends = [moment for moment in self._ends.get(name, ()) if now - moment < HOLD_SECONDS]
        if len(ends) < SHORT_LIVES:
            return ""
        return (
            f"{name} has joined and died {len(ends)} times within {HOLD_SECONDS:g} s, each time less than "
            f"{SHORT_SECONDS:g} s after it was taken in. It is not taken in for {ends[0] + HOLD_SECONDS - now:.0f} s: "
            "see there what ends it (memory, a time limit)."
        )

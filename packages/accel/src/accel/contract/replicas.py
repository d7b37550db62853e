"""Replicas that join and leave a run, for strategies that survive the death of processes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from accel_track.tracking import TrackerRun


class Replicas(ABC):
    """What a strategy decides for the whole run when its replicas join and leave between steps."""

    @abstractmethod
    def follow(self, accelerator: Any) -> None:
        """Run once, when the Accelerator is complete."""

    @abstractmethod
    def join_run(self) -> bool:
        """Join a run that others have begun, with their state; whether there was one. See ``Accelerator.resume``."""

    @abstractmethod
    def applies_step(self) -> bool:
        """Return True if the replicas apply the step; asked by a prepared optimizer, which skips it otherwise."""

    @abstractmethod
    def share_loader(self, loader: Any, split_batches: bool, even_batches: bool) -> Any:
        """Return the loader to return from ``prepare``, given the one for this process."""

    @abstractmethod
    def share_tracking(self, run: TrackerRun) -> TrackerRun:
        """Return the trackers to log to, given those of this process."""

    @property
    @abstractmethod
    def updates_per_step(self) -> int:
        """How many batches of a loader's own size a global step has, by which schedules advance."""

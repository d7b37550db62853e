"""Settings of experiment trackers."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from accel_track.channel import Delivery

from .base import KwargsHandler


@dataclass
class TrackingKwargs(KwargsHandler):
    """How logged values get from the loop to the trackers, and what happens if one fails; see :class:`accel_track.Delivery`.

    Args:
        strict: a tracker that fails raises. Otherwise it is set aside with a warning, and the run goes on.
        queue_size: calls of ``log`` that may wait for one tracker.
        start_timeout: seconds that ``init_trackers`` waits for a tracker to start.
        stall_timeout: seconds without any progress after which a tracker is given up, where somebody has to wait for it.
        finish_timeout: seconds that ``end_training`` waits for a tracker to finish, once it has been given everything.
    """

    strict: bool = False
    queue_size: int = Delivery.queue_size
    start_timeout: float = Delivery.start_timeout
    stall_timeout: float = Delivery.stall_timeout
    finish_timeout: float = Delivery.finish_timeout

    def to_delivery(self) -> Delivery:
        """The settings as accel_track takes them.

        Raises:
            ConfigurationError: a number that is not positive.
        """
        return Delivery(**asdict(self))

"""Says what a launcher waits for: after some seconds, and then every 30 s. Torch-free."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from accel_state.errors import ConfigurationError

DEFAULT_TIMEOUT_SECONDS = 900
FIRST_NOTE_SECONDS = 5.0
"""So long after its start a launcher says what it waits for."""
LEAST_SECONDS = 2.0
"""But not before it has waited for so long: machines do not start at the same moment."""
NOTE_SECONDS = 30.0


def rendezvous_settings(text: str) -> Mapping[str, str]:
    """``timeout=600,join_timeout=300`` of ``--rdzv_conf`` as a mapping, with the default timeout."""
    entries = (entry.partition("=") for entry in text.split(",") if entry)
    return {"timeout": str(DEFAULT_TIMEOUT_SECONDS), **{key.strip(): value.strip() for key, _, value in entries}}


def timeout_seconds(rdzv_conf: str) -> float:
    """How long to wait for other machines.

    Raises:
        ConfigurationError: that is not a number.
    """
    text = rendezvous_settings(rdzv_conf)["timeout"]
    try:
        return float(text)
    except ValueError:
        raise ConfigurationError(
            f"--rdzv_conf timeout={text} must be a number of seconds, such as timeout=600."
        ) from None


class Waiting:
    """A wait that begins now.

    Args:
        limit: seconds after which it is over; 0 for never.
        say: prints a line.
    """

    def __init__(self, limit: float, say: Callable[[str], None]) -> None:
        self._limit, self._say = limit, say
        self._begin, self._due = time.monotonic(), max(LEAST_SECONDS, FIRST_NOTE_SECONDS - _age())

    @property
    def seconds(self) -> float:
        """How long it has lasted."""
        return time.monotonic() - self._begin

    @property
    def is_over(self) -> bool:
        """Whether the limit has passed."""
        return bool(self._limit) and self.seconds > self._limit

    def note(self, what: Callable[[], str]) -> None:
        """Say what is waited for, if a line is due."""
        seconds = self.seconds
        if seconds > self._due:
            self._due = seconds + NOTE_SECONDS
            limit = f" of {self._limit:g} s" if self._limit else " s"
            self._say(f"waiting for {what()} ({seconds:.0f}{' s' if self._limit else ''}{limit})")


def _age() -> float:
    """Seconds since this process was started: importing torch may have taken most of them."""
    import psutil  # needed with several machines only

    return time.time() - psutil.Process().create_time()

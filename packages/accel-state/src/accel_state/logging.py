"""Logging in a run of many processes: by default only the main process writes."""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from typing import Any

from . import env
from .errors import AccelError, ConfigurationError
from .state import PartialState

_already_warned: set[tuple[str, str]] = set()


class LoggingBeforeStateError(AccelError, RuntimeError):
    """A logger was called before this process knew its rank."""


# Generic for type checkers alone before Python 3.11.
class MultiProcessAdapter(logging.LoggerAdapter):  # type: ignore[type-arg]
    """A logger whose methods take two more arguments, ``main_process_only`` (True) and ``in_order`` (False).

    Each message begins with the rank it comes from: ``[RANK 0] ...``.
    """

    def log(self, level: int, msg: object, *args: Any, **kwargs: Any) -> None:
        """Log a message.

        Args:
            level: as in :mod:`logging`.
            msg: the message, with ``%`` place holders for ``args``.
            *args: values of the place holders.
            **kwargs: of :meth:`logging.Logger.log`, and
                main_process_only (bool, True): only rank 0 writes.
                in_order (bool, False): with main_process_only=False, the ranks write one after the other; all must
                    call.

        Raises:
            LoggingBeforeStateError: no PartialState or Accelerator exists yet.
        """
        state = _state()
        main_process_only = kwargs.pop("main_process_only", True)
        in_order = kwargs.pop("in_order", False)
        # The caller's line, not this one.
        kwargs.setdefault("stacklevel", 2)
        enabled = self.isEnabledFor(level)
        text, options = self.process(msg, kwargs)
        if main_process_only or not in_order:
            if enabled and (state.is_main_process or not main_process_only):
                self.logger.log(level, text, *args, **options)
            return
        # Whether a level is enabled may differ between ranks; that everybody waits must not.
        for rank in range(state.num_processes):
            if enabled and rank == state.process_index:
                self.logger.log(level, text, *args, **options)
            state.wait_for_everyone()

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """Put the rank before the message."""
        text, kwargs = super().process(msg, kwargs)
        return f"[RANK {_state().process_index}] {text}", kwargs

    def warning_once(self, msg: object, *args: Any, **kwargs: Any) -> None:
        """Log a warning the first time that this logger is given this message with these values.

        Args:
            msg: as in :meth:`log`.
            *args: as in :meth:`log`.
            **kwargs: as in :meth:`log`.
        """
        key = (self.logger.name, f"{msg!r} {args!r}")
        if key in _already_warned:
            return
        kwargs.setdefault("stacklevel", 3)
        self.warning(msg, *args, **kwargs)
        _already_warned.add(key)


def get_logger(name: str, log_level: str | None = None) -> MultiProcessAdapter:
    """A logger for a run of many processes.

    It may be made at import time; its methods need a PartialState or an Accelerator.

    Args:
        name: as in :func:`logging.getLogger`, usually ``__name__``.
        log_level: DEBUG, INFO, WARNING, ERROR or CRITICAL; the variable ACCELERATE_LOG_LEVEL when None, and the level
            that the logger has, or inherits, when that is not set either. The root logger is left alone.

    Raises:
        ConfigurationError: no such level.
    """
    logger = logging.getLogger(name)
    source = "log_level"
    if log_level is None:
        log_level, source = env.read_str("ACCELERATE_LOG_LEVEL"), "ACCELERATE_LOG_LEVEL"
    if log_level is not None:
        try:
            logger.setLevel(log_level.strip().upper())
        except ValueError:
            raise ConfigurationError(
                f"{source}={log_level!r} is not one of DEBUG, INFO, WARNING, ERROR, CRITICAL"
            ) from None
    return MultiProcessAdapter(logger, {})


def _state() -> PartialState:
    if not PartialState._shared_state:
        raise LoggingBeforeStateError(
            "this logger writes by rank, and no rank is known yet: make a PartialState() or an Accelerator() before "
            "you log, or use "
            "logging.getLogger for messages from before that"
        )
    return PartialState()

"""Logging and progress bars in distributed runs: by default only the main process writes."""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any

from . import env
from .errors import AccelError, ConfigurationError, require
from .state import PartialState, current_rank

_already_warned: set[tuple[str, str]] = set()


class LoggingBeforeStateError(AccelError, RuntimeError):
    """A logger was called before the rank of this process was known."""


if TYPE_CHECKING:
    _Adapter = logging.LoggerAdapter[logging.Logger]
else:
    _Adapter = logging.LoggerAdapter  # not generic at run time before Python 3.11


class MultiProcessAdapter(_Adapter):
    """A logger whose methods take ``main_process_only`` (default True) and ``in_order`` (default False).

    Each message starts with its rank: ``[RANK 0] ...``.
    """

    def log(self, level: int, msg: object, *args: Any, **kwargs: Any) -> None:
        """Log a message.

        Args:
            level: as in :mod:`logging`.
            msg: the message, with ``%`` placeholders for ``args``.
            *args: values of the placeholders.
            **kwargs: of :meth:`logging.Logger.log`, and
                main_process_only (bool, True): only rank 0 writes.
                in_order (bool, False): with main_process_only=False, the ranks write one after the other; every
                    rank must make the call.

        Raises:
            LoggingBeforeStateError: no PartialState or Accelerator exists yet.
        """
        state = _state()
        main_process_only = kwargs.pop("main_process_only", True)
        in_order = kwargs.pop("in_order", False)
        kwargs.setdefault("stacklevel", 2)  # report the line of the caller
        enabled = self.isEnabledFor(level)
        text, options = self.process(msg, kwargs)
        if main_process_only or not in_order:
            if enabled and (state.is_main_process or not main_process_only):
                self.logger.log(level, text, *args, **options)
            return
        # The level may be enabled on some ranks only, but every rank must reach every barrier.
        for rank in range(state.num_processes):
            if enabled and rank == state.process_index:
                self.logger.log(level, text, *args, **options)
            state.wait_for_everyone()

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """Prepend the rank to the message."""
        text, kwargs = super().process(msg, kwargs)
        return f"[RANK {_state().process_index}] {text}", kwargs

    def warning_once(self, msg: object, *args: Any, **kwargs: Any) -> None:
        """Log a warning once for the same message and arguments; the arguments are those of :meth:`log`."""
        key = (self.logger.name, f"{msg!r} {args!r}")
        if key in _already_warned:
            return
        kwargs.setdefault("stacklevel", 3)
        self.log(logging.WARNING, msg, *args, **kwargs)
        _already_warned.add(key)


def warn_once(name: str, message: str) -> None:
    """Log a warning once in a run: on its main process, also before there is a PartialState.

    Args:
        name: the logger's name.
        message: the text, without arguments.
    """
    if current_rank()[0] == 0 and (name, message) not in _already_warned:
        _already_warned.add((name, message))
        logging.getLogger(name).warning(message, stacklevel=3)


def get_logger(name: str, log_level: str | None = None) -> MultiProcessAdapter:
    """Get a logger for distributed runs.

    It can be created at import time; its methods need a PartialState or an Accelerator.

    Args:
        name: as in :func:`logging.getLogger`, usually ``__name__``.
        log_level: DEBUG, INFO, WARNING, ERROR or CRITICAL. None uses the variable ACCELERATE_LOG_LEVEL, and leaves the
            level unchanged if that is not set. The root logger is never changed.

    Raises:
        ConfigurationError: the level is not one of these.
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
            "the rank of this process is not known yet: create a PartialState() or an Accelerator() before logging, or "
            "use logging.getLogger for earlier messages"
        )
    return PartialState()


def tqdm(*args: Any, main_process_only: bool = True, **kwargs: Any) -> Any:
    """``tqdm.auto.tqdm``, shown on one process per node.

    Args:
        *args: of tqdm; the first is the iterable.
        main_process_only: show it on the local main process only.
        **kwargs: of tqdm. ``disable=True`` hides it everywhere.

    Raises:
        ConfigurationError: the first argument is a bool, as in an older signature.
        MissingDependencyError: tqdm is not installed.
    """
    if args and isinstance(args[0], bool):
        raise ConfigurationError(
            f"the first argument of tqdm is {args[0]}; pass the iterable, and main_process_only as a keyword"
        )
    bar = require("tqdm.auto", purpose="a progress bar", install="tqdm").tqdm
    if main_process_only and not kwargs.get("disable", False):
        kwargs["disable"] = PartialState().local_process_index != 0
    return bar(*args, **kwargs)

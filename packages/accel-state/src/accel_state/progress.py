"""A progress bar for distributed runs."""

from __future__ import annotations

from typing import Any

from .errors import ConfigurationError, require
from .state import PartialState


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

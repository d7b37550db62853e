"""The errors that accel raises on its own account. Every message says the value, what is allowed and the next step."""

from __future__ import annotations

import importlib
from types import ModuleType


class AccelError(Exception):
    """Base class of accel's own errors."""


class ConfigurationError(AccelError, ValueError):
    """An argument, variable, flag or configuration key that cannot be used as it is."""


class MissingDependencyError(AccelError, ImportError):
    """An optional package is needed and not installed; the message holds the pip command."""


class DistributedOperationException(AccelError):
    """A collective was called with different operations, structures, shapes or dtypes on different ranks."""


class CollectiveTimeoutError(AccelError, RuntimeError):
    """A collective did not complete; the message says which ranks arrived, and the source line each one waits at."""


def require(module: str, *, purpose: str, install: str) -> ModuleType:
    """Import an optional module, or say how to get it.

    Args:
        module: import name ("torchdata.stateful_dataloader").
        purpose: what needs it, for the message ("use_stateful_dataloader=True").
        install: what to give to pip ("accel-data[stateful]").

    Raises:
        MissingDependencyError: the module is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        # A module that is there but fails on an import of its own must not be reported as missing.
        if error.name is None or not (module == error.name or module.startswith(error.name + ".")):
            raise
        raise MissingDependencyError(
            f"{purpose} needs the module {module}. Install it with: pip install '{install}'"
        ) from error

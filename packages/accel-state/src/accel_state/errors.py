"""The exceptions that accel raises. Every message gives the value, what is allowed and the next step."""

from __future__ import annotations

import importlib
import reprlib
from types import ModuleType


class AccelError(Exception):
    """Base class of the exceptions that accel defines."""


class ConfigurationError(AccelError, ValueError):
    """An argument, variable, flag or configuration key with an invalid value."""


class ArgumentTypeError(ConfigurationError, TypeError):
    """An argument of the wrong type."""


class UnknownChoiceError(ConfigurationError, KeyError):
    """A name that is not one of the allowed ones."""

    __str__ = Exception.__str__  # KeyError shows its message in quotes


class MissingFileError(ConfigurationError, FileNotFoundError):
    """A file that an option or an argument names does not exist."""


class MissingDependencyError(AccelError, ImportError):
    """An optional package is required but not installed; the message has the pip command."""


class DistributedOperationException(AccelError):
    """A collective was called with different operations, structures, shapes or dtypes on different ranks."""


class CollectiveTimeoutError(AccelError, RuntimeError):
    """A collective did not complete; the message lists the ranks that arrived, and where each one waits."""


def check_type(value: object, kind: type | tuple[type, ...], call: str, hint: str) -> None:
    """Raise ArgumentTypeError if a value is not an instance of a type.

    Args:
        value: the value.
        kind: the type, or several.
        call: the function or argument that got it, for the message.
        hint: what to pass instead.
    """
    if not isinstance(value, kind):
        text = (
            f"the class {value.__name__}"
            if isinstance(value, type)
            else f"{' '.join(reprlib.repr(value).split())}, a {type(value).__name__}"
        )
        raise ArgumentTypeError(f"{call} got {text}. {hint}")


def require(module: str, *, purpose: str, install: str) -> ModuleType:
    """Import an optional module, with the pip command in the error if it is missing.

    Args:
        module: import name ("torchdata.stateful_dataloader").
        purpose: the feature that needs it, for the message ("use_stateful_dataloader=True").
        install: the argument of pip install ("accel-data[stateful]").

    Raises:
        MissingDependencyError: the module is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        # An installed module whose own import fails must not be reported as missing.
        if error.name is None or not (module == error.name or module.startswith(error.name + ".")):
            raise
        raise MissingDependencyError(
            f"{purpose} needs the module {module}. Install it with: pip install '{install}'"
        ) from error

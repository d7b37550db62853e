"""Environment variables: the only module that reads or writes those that a launcher hands to its processes.

Torch-free. Everybody else asks the readers here, or the option groups of :mod:`accel_state.options`, which are built on
them.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from .errors import ConfigurationError

PREFIX = "ACCELERATE_"
"""Variables with this prefix belong to the launcher and are the ones that :func:`purge_accelerate_environment`
restores.
"""

TRUE_WORDS = ("y", "yes", "t", "true", "on", "1")
FALSE_WORDS = ("n", "no", "f", "false", "off", "0")

# Characters that would end an assignment early, or begin another command, where KEY=VALUE lines are given to a shell.
_UNSAFE_IN_VALUE = frozenset(";\n<> ")

T = TypeVar("T", bound=Callable[..., Any])


def str_to_bool(value: Any, to_bool: bool = False) -> int | bool:
    """Read a word as true or false.

    Args:
        value: one of y, yes, t, true, on, 1 or n, no, f, false, off, 0, in any case.
        to_bool: return a bool rather than 1 or 0.

    Raises:
        ConfigurationError: (a ValueError) any other word.
    """
    word = str(value).strip().lower()
    if word in TRUE_WORDS:
        return True if to_bool else 1
    if word in FALSE_WORDS:
        return False if to_bool else 0
    raise ConfigurationError(
        f"{value!r} is neither true nor false. Allowed: {', '.join(TRUE_WORDS)} or {', '.join(FALSE_WORDS)}."
    )


def read_str(key: str, default: str | None = None, environ: Mapping[str, str] | None = None) -> str | None:
    """The variable's text, or ``default`` where it is unset or empty (``KEY= command`` is how a shell unsets one for a
    command).
    """
    value = (os.environ if environ is None else environ).get(key, "")
    return value if value.strip() else default


def all_variables() -> dict[str, str]:
    """Every environment variable of this process, as a copy."""
    return dict(os.environ)


def parse_flag_from_env(key: str, default: bool = False) -> bool:
    """The variable as a flag; ``default`` where it is unset or empty.

    Raises:
        ConfigurationError: the variable is neither true nor false; the message names it.
    """
    value = read_str(key)
    if value is None:
        return default
    try:
        return bool(str_to_bool(value))
    except ConfigurationError as error:
        raise ConfigurationError(f"environment variable {key}: {error}") from None


def parse_choice_from_env(key: str, default: str = "no") -> str:
    """The variable as text; ``str(default)`` where it is unset."""
    return str(os.environ.get(key, str(default)))


def get_int_from_env(env_keys: Iterable[str], default: int) -> int:
    """The first of several variables that holds an integer of at least 0; ``default`` where none does.

    Raises:
        ConfigurationError: a variable is set to something that is not an integer.
    """
    for key in env_keys:
        value = read_int(key)
        if value is not None and value >= 0:
            return value
    return default


def read_int(key: str, environ: Mapping[str, str] | None = None) -> int | None:
    """The variable as an integer; None where it is unset or empty.

    Raises:
        ConfigurationError: the variable is not an integer; the message names it.
    """
    value = read_str(key, environ=environ)
    if value is None:
        return None
    try:
        return int(value)
    except ValueError:
        raise ConfigurationError(
            f"environment variable {key}={value!r} is not an integer. Set it to one, or unset it."
        ) from None


def are_libraries_initialized(*library_names: str) -> list[str]:
    """Those of the given top-level modules that this process has already imported."""
    return [name for name in library_names if name in sys.modules]


def export(**variables: str) -> None:
    """Set variables for this process, for what it starts, and for the libraries it loads."""
    os.environ.update(variables)


@contextmanager
def patch_environment(**kwargs: Any) -> Iterator[None]:
    """Set variables (names are upper-cased) for the time of a ``with`` block.

    On leaving it the former values are back, also when the block raised.

    Example:
        >>> with patch_environment(accelerate_mixed_precision="bf16"):
        ...     parse_choice_from_env("ACCELERATE_MIXED_PRECISION")
        'bf16'
    """
    values = {key.upper(): str(value) for key, value in kwargs.items()}
    before = {key: os.environ.get(key) for key in values}
    os.environ.update(values)
    try:
        yield
    finally:
        _restore(before)


@contextmanager
def clear_environment() -> Iterator[None]:
    """Empty the environment for the time of a ``with`` block; variables set inside it are dropped on leaving it."""
    before = dict(os.environ)
    os.environ.clear()
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def purge_accelerate_environment(func_or_cls: T) -> T:
    """Decorate a function, or every test method of a class, so that it leaves no ACCELERATE_ variable changed behind.

    Variables that were set before keep their values; those that the function added are removed, also when it raises.
    On a class, ``setUp`` and ``tearDown`` style methods are left alone: what they set is meant to last for the test.
    """
    if not inspect.isclass(func_or_cls):
        purged: T = _purged(func_or_cls)
        return purged
    for name, member in list(vars(func_or_cls).items()):
        if name.startswith("test") and inspect.isfunction(member):
            setattr(func_or_cls, name, _purged(member))
    return func_or_cls


def convert_dict_to_env_variables(current_env: Mapping[str, Any]) -> list[str]:
    r"""``KEY=value\n`` lines for a file of variables; an entry that a shell would misread is left out with a warning."""
    lines = []
    for key, value in current_env.items():
        if key and str(value) and not _UNSAFE_IN_VALUE & set(f"{key}{value}"):
            lines.append(f"{key}={value}\n")
        else:
            warnings.warn(
                f"environment variable {key}={str(value)!r} is left out: an empty one, or one with ; < > space or "
                "newline, "
                "cannot be written as KEY=value",
                stacklevel=2,
            )
    return lines


def _purged(function: Any) -> Any:
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def run_async(*args: Any, **kwargs: Any) -> Any:
            with preserve_accelerate_environment():
                return await function(*args, **kwargs)

        return run_async

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with preserve_accelerate_environment():
            return function(*args, **kwargs)

    return run


@contextmanager
def preserve_accelerate_environment() -> Iterator[None]:
    """Put every ACCELERATE_ variable back as it was, on leaving the ``with`` block."""
    before: dict[str, str | None] = {key: value for key, value in os.environ.items() if key.startswith(PREFIX)}
    try:
        yield
    finally:
        added = {key: None for key in os.environ if key.startswith(PREFIX) and key not in before}
        _restore({**before, **added})


def _restore(values: Mapping[str, str | None]) -> None:
    for key, value in values.items():
        if value is None:
            os.environ.pop(key, None)
        else:
            os.environ[key] = value

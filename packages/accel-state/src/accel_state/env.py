"""The only module that reads or writes the environment variables that a launcher passes to its processes.

Torch-free. All other code uses these functions, or the option groups of :mod:`accel_state.options`.
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
"""Prefix of the launcher's variables, which :func:`purge_accelerate_environment` restores."""

TRUE_WORDS = ("y", "yes", "t", "true", "on", "1")
FALSE_WORDS = ("n", "no", "f", "false", "off", "0")

# Characters with a meaning to a shell that reads KEY=VALUE lines.
_UNSAFE_IN_VALUE = frozenset(";\n<> ")

T = TypeVar("T", bound=Callable[..., Any])


def str_to_bool(value: Any, to_bool: bool = False) -> int | bool:
    """Parse a boolean.

    Args:
        value: one of y, yes, t, true, on, 1 or n, no, f, false, off, 0, in any case.
        to_bool: return a bool rather than 1 or 0.

    Raises:
        ConfigurationError: (a ValueError) any other text.
    """
    text = str(value).strip().lower()
    if text in TRUE_WORDS:
        return True if to_bool else 1
    if text in FALSE_WORDS:
        return False if to_bool else 0
    raise ConfigurationError(
        f"{value!r} is neither true nor false. Allowed: {', '.join(TRUE_WORDS)} or {', '.join(FALSE_WORDS)}."
    )


def read_str(key: str, default: str | None = None, environ: Mapping[str, str] | None = None) -> str | None:
    """Return the variable's text, or ``default`` if it is unset or empty (as in the shell command ``KEY= command``)."""
    value = (os.environ if environ is None else environ).get(key, "")
    return value if value.strip() else default


def all_variables() -> dict[str, str]:
    """Return every environment variable of this process, as a copy."""
    return dict(os.environ)


def parse_flag_from_env(key: str, default: bool = False) -> bool:
    """Return the variable as a boolean; ``default`` if it is unset or empty.

    Raises ConfigurationError for other text.
    """
    value = read_str(key)
    if value is None:
        return default
    try:
        return bool(str_to_bool(value))
    except ConfigurationError as error:
        raise ConfigurationError(f"environment variable {key}: {error}") from None


def parse_choice_from_env(key: str, default: str = "no") -> str:
    """Return the variable as text; ``str(default)`` if it is unset."""
    return str(os.environ.get(key, str(default)))


def get_int_from_env(env_keys: Iterable[str], default: int) -> int:
    """Return the first non-negative integer among several variables; ``default`` if there is none."""
    for key in env_keys:
        value = read_int(key)
        if value is not None and value >= 0:
            return value
    return default


def read_int(key: str, environ: Mapping[str, str] | None = None) -> int | None:
    """Return the variable as an integer; None if it is unset or empty. Raises ConfigurationError for other text."""
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
    """Return those of the given top-level modules that this process has already imported."""
    return [name for name in library_names if name in sys.modules]


def export(**variables: str) -> None:
    """Set variables of this process, which child processes inherit."""
    os.environ.update(variables)


def unset(*names: str) -> None:
    """Remove variables of this process."""
    for name in names:
        os.environ.pop(name, None)


@contextmanager
def patch_environment(**kwargs: Any) -> Iterator[None]:
    """Set variables (names are upper-cased) for a ``with`` block, and restore the previous values afterwards.

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
    """Empty the environment for a ``with`` block, and restore it afterwards."""
    before = dict(os.environ)
    os.environ.clear()
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def purge_accelerate_environment(func_or_cls: T) -> T:
    """Decorate a function, or every test method of a class, to restore the ACCELERATE_ variables when it ends.

    On a class, this includes the test methods of its subclasses. Methods such as ``setUp`` are not decorated: the
    variables that they set must last for the test.
    """
    if not inspect.isclass(func_or_cls):
        purged: T = _purged(func_or_cls)
        return purged
    cls: Any = func_or_cls
    _purge_tests(cls)
    inherited = vars(cls).get("__init_subclass__")

    def init_subclass(subclass: type, /, **kwargs: Any) -> None:
        if inherited is None:
            super(cls, subclass).__init_subclass__(**kwargs)
        else:
            inherited.__get__(None, subclass)(**kwargs)
        _purge_tests(subclass)

    cls.__init_subclass__ = classmethod(init_subclass)
    return func_or_cls


def _purge_tests(cls: type) -> None:
    for name, member in list(vars(cls).items()):
        if not name.startswith("test"):
            continue
        if isinstance(member, (classmethod, staticmethod)):
            setattr(cls, name, type(member)(_purged(member.__func__)))
        elif inspect.isfunction(member):
            setattr(cls, name, _purged(member))


def convert_dict_to_env_variables(current_env: Mapping[str, Any]) -> list[str]:
    r"""``KEY=value\n`` lines; an entry that a shell would misread is left out with a warning."""
    lines = []
    for key, value in current_env.items():
        if key and str(value) and not _UNSAFE_IN_VALUE & set(f"{key}{value}"):
            lines.append(f"{key}={value}\n")
        else:
            warnings.warn(
                f"environment variable {key}={str(value)!r} is left out: a name or value that is empty or contains "
                "; < > space or newline cannot be written as KEY=value",
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

    return preserve_accelerate_environment()(function)


@contextmanager
def preserve_accelerate_environment() -> Iterator[None]:
    """Restore every ACCELERATE_ variable after a ``with`` block."""
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

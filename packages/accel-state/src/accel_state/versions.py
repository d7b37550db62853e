"""Compares versions of installed packages."""

from __future__ import annotations

import functools
import importlib.metadata
import operator
from collections.abc import Callable
from typing import Any

from packaging.version import InvalidVersion, Version, parse

from .errors import ConfigurationError, MissingDependencyError

_OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "<=": operator.le,
    "<": operator.lt,
}


def compare_versions(library_or_version: str | Version, operation: str, requirement_version: str) -> bool:
    """Compare the version of a package with another one.

    Args:
        library_or_version: name of an installed distribution ("torch"), or a parsed version.
        operation: one of ``> >= == != <= <``.
        requirement_version: the version to compare with ("2.6"); local parts and pre-releases count as in PEP 440.

    Raises:
        ConfigurationError: the operation or ``requirement_version`` is invalid.
        MissingDependencyError: the distribution is not installed.
    """
    compare = _OPERATIONS.get(operation)
    if compare is None:
        raise ConfigurationError(f"operation={operation!r} is not one of {' '.join(_OPERATIONS)}")
    try:
        required = parse(requirement_version)
    except InvalidVersion:
        raise ConfigurationError(
            f"requirement_version={requirement_version!r} is not a version such as '2.6' or '2.6.1rc1'"
        ) from None
    version = _installed_version(library_or_version) if isinstance(library_or_version, str) else library_or_version
    return bool(compare(version, required))


def is_torch_version(operation: str, version: str) -> bool:
    """Compare the installed torch with a version, as :func:`compare_versions` does."""
    return compare_versions("torch", operation, version)


@functools.cache
def _installed_version(library: str) -> Version:
    try:
        return parse(importlib.metadata.version(library))
    except importlib.metadata.PackageNotFoundError as error:
        raise MissingDependencyError(
            f"the package {library!r} is not installed. Install it with: pip install {library}"
        ) from error

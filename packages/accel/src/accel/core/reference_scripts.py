"""Modules that were written for Accelerate, for which ``load_state`` keeps its meaning.

The package ``accelerate`` of accel-compat adds the modules that take ``Accelerator`` from it.
"""

from __future__ import annotations

_known: set[str] = set()


def add(module: str) -> None:
    """Note that a module takes its names from ``accelerate``."""
    _known.add(module)


def are_written_in(module: str) -> bool:
    """Whether a module takes its names from ``accelerate``."""
    return module in _known

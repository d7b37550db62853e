"""Makes ``import accelerate`` give accel in this process."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

COVERED_VERSION = "1.15.0"
"""The version of Accelerate whose interface is covered: what ``importlib.metadata.version("accelerate")`` gives."""


def shim_path() -> Path:
    """Return the directory for ``sys.path``: a package ``accelerate`` and the metadata of a distribution."""
    return Path(__file__).with_name("shim")


def is_shim(module: object) -> bool:
    """Return True if an imported module ``accelerate`` is the one of this package."""
    file = getattr(module, "__file__", None)
    return file is not None and Path(file).resolve().is_relative_to(shim_path().resolve())


def install() -> None:
    """Make ``import accelerate`` give accel in this process. Nothing is written; calling it again does nothing.

    Processes that this one starts are not affected: put :func:`shim_path` on their ``PYTHONPATH``.

    Raises:
        RuntimeError: another ``accelerate`` was imported before.
    """
    imported = sys.modules.get("accelerate")
    if imported is not None and not is_shim(imported):
        raise RuntimeError(
            f"accelerate is already imported from {getattr(imported, '__file__', None)}. "
            "Call accel_compat.install() before the first import of accelerate and of libraries that import it."
        )
    path = str(shim_path())
    if path not in sys.path:
        sys.path.insert(0, path)
        importlib.invalidate_caches()

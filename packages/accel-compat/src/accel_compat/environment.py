"""Makes every process of a Python environment import accel as accelerate, and undoes it."""

from __future__ import annotations

import importlib.metadata
import os
import sys
import sysconfig
from pathlib import Path

from .install import COVERED_VERSION, shim_path

# Python reads the files *.pth of site-packages when it starts: each line is a directory for sys.path.
PATH_FILE = "accel_compat_shim.pth"
_COMMAND = """#!{python}
# Written by `python -m accel_compat enable`; `python -m accel_compat disable` removes it.
import sys

from accel_launch.cli import main

sys.exit(main())
"""


class RefusedError(RuntimeError):
    """The environment cannot be changed; the message says why and what to do."""


def enable() -> list[Path]:
    """Make ``import accelerate`` give accel in this environment, and add the command ``accelerate``.

    Returns:
        The files that were written; none if it is enabled already.

    Raises:
        RefusedError: Accelerate is installed, or the environment cannot be written.
    """
    installed = installed_accelerate()
    if installed is not None:
        raise RefusedError(
            f"Accelerate {installed.version} is installed in {installed.locate_file('')}, which accel would replace. "
            f"Uninstall it first:\n    {sys.executable} -m pip uninstall accelerate"
        )
    taken = [path for path, content in _files().items() if path.exists() and path.read_text("utf-8") != content]
    if taken:
        raise RefusedError(f"{taken[0]} exists, and accel_compat has not written it. Remove it first.")
    written: list[Path] = []
    try:
        for path, content in _files().items():
            if not path.exists():
                path.write_text(content, encoding="utf-8")
                written.append(path)
                if path.suffix != ".pth":
                    path.chmod(0o755)
    except OSError as error:
        for path in written:
            path.unlink()
        raise RefusedError(
            f"{error.filename} cannot be written: {error.strerror}. Use an environment of your own (python -m venv), "
            "or `accel launch --as-accelerate`, which writes nothing."
        ) from error
    return written


def disable() -> list[Path]:
    """Remove what :func:`enable` wrote, and return those files."""
    removed = [path for path in _files() if _is_ours(path)]
    for path in removed:
        path.unlink()
    return removed


def is_enabled() -> bool:
    """Return True if ``import accelerate`` gives accel in new processes of this environment."""
    return _is_ours(_directory("purelib") / PATH_FILE)


def installed_accelerate() -> importlib.metadata.Distribution | None:
    """Return the real Accelerate of this environment, or None."""
    for found in importlib.metadata.distributions(name="accelerate"):
        if Path(str(found.locate_file(""))).resolve() != shim_path().resolve():
            return found
    return None


def _directory(kind: str) -> Path:
    return Path(sysconfig.get_path(kind))


def _files() -> dict[Path, str]:
    files = {_directory("purelib") / PATH_FILE: f"{shim_path()}\n"}
    if os.name == "posix":
        # Elsewhere a command is a program that an installer generates; use `python -m accelerate.commands.launch`.
        files[_directory("scripts") / "accelerate"] = _COMMAND.format(python=sys.executable)
    return files


def _is_ours(path: Path) -> bool:
    """Return True if enable wrote a file, perhaps of an environment that was moved since."""
    if not path.is_file():
        return False
    text = path.read_text("utf-8", errors="replace")
    return path.name == PATH_FILE or "python -m accel_compat enable" in text


def describe() -> str:
    """Return the state of this environment in a sentence."""
    if is_enabled():
        return f"enabled: `import accelerate` gives accel, as version {COVERED_VERSION}, in {sys.prefix}."
    installed = installed_accelerate()
    if installed is not None:
        return f"disabled: Accelerate {installed.version} is installed in {installed.locate_file('')}."
    return f"disabled: no `accelerate` in {sys.prefix}. `python -m accel_compat enable` makes it accel."

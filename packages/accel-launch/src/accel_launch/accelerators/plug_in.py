"""Devices that only torch can count: those of vendors' plug-ins, of builds for them, and of the entry point group."""

from __future__ import annotations

import functools
import importlib.util
import json
import subprocess
import warnings
from collections.abc import Mapping
from importlib import metadata

from accel_state.registry import installed_entry_points

from ..entrypoint import python_command

ENTRY_POINTS = "accel.devices"
_PACKAGES = ("torch_npu", "torch_mlu", "torch_musa", "torch_sdaa", "habana_frameworks")
_PROGRAM = f"{__package__}.list_devices"
MARK = "accel:devices "
"""What the program prints in front of its answer."""
_SECONDS = 120  # torch and a vendor's libraries are imported from a cold disk


def is_possible() -> bool:
    """Return True if a package that is installed may bring such a device. Takes milliseconds."""
    if any(importlib.util.find_spec(package) is not None for package in _PACKAGES):
        return True
    try:
        build = metadata.version("torch")
    except metadata.PackageNotFoundError:
        return False
    return build.endswith("+xpu") or any(installed_entry_points(ENTRY_POINTS))


def count(environ: Mapping[str, str]) -> tuple[int, str | None, str]:
    """Devices that a process with these variables sees, the variable that selects among them, and their name."""
    return _ask(frozenset(environ.items())) if is_possible() else (0, None, "")


@functools.lru_cache(maxsize=8)
def _ask(environ: frozenset[tuple[str, str]]) -> tuple[int, str | None, str]:
    command = python_command("-m", _PROGRAM)
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, env=dict(environ), timeout=_SECONDS, check=False, errors="replace"
        )
    except subprocess.TimeoutExpired:
        warnings.warn(f"torch did not list the devices within {_SECONDS} s", RuntimeWarning, stacklevel=2)
        return 0, None, ""
    found = [line.removeprefix(MARK) for line in done.stdout.splitlines() if line.startswith(MARK)]
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        warnings.warn(f"torch cannot list the devices: {last}", RuntimeWarning, stacklevel=2)
    if not found:
        return 0, None, ""
    number, variable, name = json.loads(found[0])
    return int(number), variable, str(name)

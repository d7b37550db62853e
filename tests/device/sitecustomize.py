"""Puts the device in ``ACCEL_TEST_DEVICE`` in the place of the CPU, in every process that a test starts.

Tests ask for the CPU (``cpu=True``, ``ACCELERATE_USE_CPU``), so that they do the same on every machine. With this
folder on ``PYTHONPATH``, accel takes such a request for one of the device. Nothing is imported before accel imports it.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any


def _detect_device(module: ModuleType) -> None:
    original = module.detect
    module.detect = lambda cpu=False: original()


def _start_on_device(module: ModuleType) -> None:
    original = module.PartialState.__init__

    def start(self: Any, cpu: bool = False, **kwargs: Any) -> None:
        original(self, **kwargs)

    module.PartialState.__init__ = start


def _compare_values(module: ModuleType) -> None:
    """Tests compare what was computed on the device with what the CPU computes. accel's own code may not mix them."""
    assert_close = module.assert_close

    def close(*args: Any, check_device: bool = False, **kwargs: Any) -> None:
        assert_close(*args, check_device=check_device, **kwargs)

    module.assert_close = close


def _compare_bits(module: ModuleType) -> None:
    """As above."""
    import torch

    equal = torch.equal

    def same(input: torch.Tensor, other: torch.Tensor) -> bool:
        if input.device != other.device and "tests" in Path(sys._getframe(1).f_code.co_filename).parts:
            return equal(input.cpu(), other.cpu())
        return equal(input, other)

    torch.equal = same


_CHANGES = {
    "accel_state.devices.registry": _detect_device,
    "accel_state.state.partial": _start_on_device,
    "torch.testing._comparison": _compare_values,
    "accel_state.devices.base": _compare_bits,  # imported with the first part of accel, when torch is complete
}


class _Finder(importlib.abc.MetaPathFinder):
    """Applies a change to a module that was just loaded."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        change = _CHANGES.get(name)
        spec = importlib.machinery.PathFinder.find_spec(name, path) if change is not None else None
        if spec is None or spec.loader is None or change is None:
            return None
        load = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            change(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if os.environ.get("ACCEL_TEST_DEVICE") and os.environ.get("ACCEL_TEST_IN_PLACE", "1") == "1":
    sys.meta_path.insert(0, _Finder())

"""The tests of this folder run with a device: ``scripts/test --device simgpu`` or ``scripts/test --device cuda``."""

from __future__ import annotations

import os
from pathlib import Path

_NAME = os.environ.get("ACCEL_TEST_DEVICE")
_OF_CUDA = ["test_cuda.py"]


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave out what is about another device."""
    if not collection_path.name.startswith("test_"):
        return None
    wanted = {"cuda": collection_path.name in _OF_CUDA, "simgpu": collection_path.name not in _OF_CUDA}
    return None if wanted.get(str(_NAME), False) else True

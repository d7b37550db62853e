"""Loads a program of benchmarks/, whose parts import each other as if they were in the path."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@contextlib.contextmanager
def loaded_benchmark(name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A block with the module; the parts that it imports are forgotten at the end."""
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
    before = set(sys.modules)
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    yield module
    for part in set(sys.modules) - before:
        if (BENCHMARKS / f"{part}.py").is_file():
            sys.modules.pop(part, None)

"""Lazy package exports, declared once in the package's ``__init__.pyi``.

The stub is the only list of exports: type checkers read it, and :func:`attach` reads it to import a name on first use,
so that `accel --help` does not import torch. lazy_loader's ``attach_stub`` is not enough: it accepts only relative
imports of the same package, and our stubs re-export names from sibling distributions.
"""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any


def attach(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return ``__getattr__``, ``__dir__`` and ``__all__`` for the package named ``package``, from its stub.

    Public submodules are attributes too, imported on first use: ``import accel; accel.utils.set_seed(1)``.
    """
    module = sys.modules[package]
    file = module.__file__
    if file is None:
        raise ImportError(f"{package} has no file, so the stub that lists its exports cannot be found")
    exports = _read_exports(Path(file).with_suffix(".pyi"), package)

    def __getattr__(name: str) -> Any:
        try:
            source, attribute = exports[name]
        except KeyError:
            if not name.startswith("_") and hasattr(module, "__path__") and find_spec(f"{package}.{name}") is not None:
                return importlib.import_module(f"{package}.{name}")
            raise AttributeError(f"module {package!r} has no attribute {name!r}") from None
        value: Any = importlib.import_module(source)
        if attribute is not None:
            value = getattr(value, attribute)
        setattr(module, name, value)  # later accesses bypass __getattr__
        return value

    def __dir__() -> list[str]:
        return sorted(set(vars(module)) | set(exports))

    return __getattr__, __dir__, sorted(exports)


def _read_exports(stub: Path, package: str) -> dict[str, tuple[str, str | None]]:
    """Map each exported name to (module, attribute); the attribute is None if the name is a submodule."""
    exports: dict[str, tuple[str, str | None]] = {}
    # One dot is the package itself in an __init__, and the containing package in a plain module.
    parts = package.split(".") if stub.stem == "__init__" else package.split(".")[:-1]
    for node in ast.parse(stub.read_text(encoding="utf-8"), str(stub)).body:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue  # the docstring
        if not isinstance(node, ast.ImportFrom):
            raise ImportError(f"{stub}:{node.lineno}: only `from module import name as name` is allowed here")
        base = ".".join(parts[: len(parts) - node.level + 1]) if node.level else ""
        source = ".".join(piece for piece in (base, node.module) if piece)
        for alias in node.names:
            name = alias.asname or alias.name
            if name in exports:
                raise ImportError(f"{stub}:{node.lineno}: {name} is exported twice")
            is_submodule = node.module is None
            exports[name] = (f"{source}.{alias.name}", None) if is_submodule else (source, alias.name)
    return exports

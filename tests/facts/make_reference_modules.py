"""Writes the names that the modules of Accelerate define, as seen by importing them: run it with the Python of an
environment in which Accelerate is installed, `python tests/facts/make_reference_modules.py`.
"""

from __future__ import annotations

import importlib
import pkgutil
import types
import warnings
from pathlib import Path

import accelerate
import compact_json


def main() -> None:
    warnings.simplefilter("ignore")
    names: dict[str, list[str]] = {}
    for found in pkgutil.walk_packages(accelerate.__path__, "accelerate."):
        if any(part in found.name for part in (".test_utils", ".menu", "__main__")):
            continue
        try:
            module = importlib.import_module(found.name)
        except ImportError:
            continue  # needs a library that is not installed
        names[found.name] = [name for name, value in vars(module).items() if _is_own(module.__name__, name, value)]
    text = compact_json.dumps({module: sorted(own) for module, own in names.items()})
    Path(__file__).with_name("reference_modules.json").write_text(text + "\n")


def _is_own(module: str, name: str, value: object) -> bool:
    """Functions and classes that the module defines, and constants."""
    if name.startswith("__") or name in ("annotations", "TYPE_CHECKING", "logger", "description", "_description"):
        return False
    if isinstance(value, types.ModuleType):
        return False
    return getattr(value, "__module__", module) == module if callable(value) else name.lstrip("_").isupper()


if __name__ == "__main__":
    main()

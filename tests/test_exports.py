"""The exported names of each package are those of a committed list: a new public name is a reviewed decision.

`python tests/test_exports.py` writes the lists anew; the diff is what a reviewer looks at.
"""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from workspace import import_name, module_name, projects, sources

FACTS = Path(__file__).parent / "facts" / "exports"
UPDATE = "python tests/test_exports.py"


def _modules() -> list[str]:
    """Every package, and every public module in it that declares in a stub what it exports."""
    names = []
    for project in projects():
        for file in sources(project):
            name = module_name(project, file)
            is_public = not any(part.startswith("_") for part in name.split("."))
            if name == import_name(project) or (is_public and file.with_suffix(".pyi").exists()):
                names.append(name)
    return sorted(names)


def _exports(name: str) -> list[str]:
    return sorted(importlib.import_module(name).__all__)


def _listed(name: str) -> list[str]:
    file = FACTS / f"{name}.txt"
    return file.read_text(encoding="utf-8").split() if file.exists() else []


@pytest.mark.parametrize("name", _modules())
def test_exports_are_the_reviewed_ones(name: str) -> None:
    actual, listed = set(_exports(name)), set(_listed(name))
    assert actual == listed, (
        f"{name} exports {sorted(actual - listed)} beyond the list and lacks {sorted(listed - actual)}. "
        f"If that is meant, say so in the package's CHANGELOG and run `{UPDATE}`."
    )


@pytest.mark.parametrize("name", _modules())
def test_every_exported_name_can_be_had(name: str) -> None:
    module = importlib.import_module(name)
    missing = [export for export in module.__all__ if not hasattr(module, export)]
    assert not missing, f"{name} announces {missing}, which its modules do not have"
    assert set(module.__all__) <= set(dir(module))


def test_no_list_without_a_module() -> None:
    assert {file.stem for file in FACTS.glob("*.txt")} == set(_modules())


def main() -> None:
    FACTS.mkdir(parents=True, exist_ok=True)
    for file in FACTS.glob("*.txt"):
        file.unlink()
    for name in _modules():
        (FACTS / f"{name}.txt").write_text("".join(f"{export}\n" for export in _exports(name)), encoding="utf-8")
        print(f"{FACTS.name}/{name}.txt: {len(_exports(name))} names")


if __name__ == "__main__":
    main()

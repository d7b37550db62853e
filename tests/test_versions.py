"""The version of a distribution is the same everywhere, and siblings require each other consistently."""

from __future__ import annotations

import ast
import importlib.metadata
import itertools
import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from workspace import ROOT, import_name, metadata, projects

each_project = pytest.mark.parametrize("project", projects(), ids=lambda project: project.name)


@each_project
def test_versions_agree(project: Path) -> None:
    version = metadata(project)["version"]
    source = project.joinpath("src", import_name(project), "__init__.py").read_text(encoding="utf-8")
    assigned = [
        ast.literal_eval(node.value)
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign)
        and any(isinstance(target, ast.Name) and target.id == "__version__" for target in node.targets)
    ]
    entries = re.findall(r"^## (\S+)", project.joinpath("CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert assigned == [version]
    assert entries[0] == version, "the top entry of the CHANGELOG is the version that pyproject.toml announces"
    assert len(set(entries)) == len(entries)


@each_project
def test_version_is_above_the_unrelated_accel_of_the_public_index(project: Path) -> None:
    major, *_ = metadata(project)["version"].split(".")
    assert int(major) >= 1


@each_project
def test_siblings_are_pinned_to_one_major_version(project: Path) -> None:
    ours = {other.name: metadata(other)["version"] for other in projects()}
    requirements = [
        *metadata(project)["dependencies"],
        *itertools.chain(*metadata(project).get("optional-dependencies", {}).values()),
    ]
    for requirement in requirements:
        name, pin = re.fullmatch(r"([\w-]+)(?:\[[\w,-]+\])?(.*)", requirement).groups()  # type: ignore[union-attr]
        if name in ours:
            major, minor, *_ = ours[name].split(".")
            lowest = re.fullmatch(rf">={major}\.(\d+),<{int(major) + 1}", pin)
            assert lowest, f"{project.name} asks for {requirement}; the form is {name}>={major}.N,<{int(major) + 1}"
            assert int(lowest[1]) <= int(minor)


@each_project
def test_every_distribution_has_metadata(project: Path) -> None:
    about = metadata(project)
    assert about["name"] == project.name
    # A package may carry a file of another library, whose licence it names and includes.
    assert about["license"].split(" AND ")[0] == "Apache-2.0"
    assert len(about["license"].split(" AND ")) == len(about["license-files"])
    assert about["requires-python"] == ">=3.10"
    assert project.joinpath("LICENSE").read_text() == ROOT.joinpath("LICENSE").read_text()
    assert project.joinpath("README.md").read_text().startswith(f"# {project.name}\n")
    assert project.joinpath("src", import_name(project), "py.typed").exists()
    assert list(project.joinpath("tests").glob("test_*.py")), "a package has tests of its own"


@each_project
def test_the_environment_holds_what_its_distributions_require(project: Path) -> None:
    """pip reports a conflict with every installation into an environment that does not."""
    try:
        required = importlib.metadata.requires(project.name) or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{project.name} is not installed here")
    for requirement in map(Requirement, required):
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            assert requirement.specifier.contains(importlib.metadata.version(requirement.name)), str(requirement)


def test_constraints_pin_exactly_and_satisfy_the_declarations() -> None:
    lines = [
        line for line in ROOT.joinpath("constraints.txt").read_text().splitlines() if line and not line.startswith("#")
    ]
    pinned = {re.fullmatch(r"([a-z0-9.-]+)==[^=\s;]+(; .+)?", line)[1] for line in lines}  # type: ignore[index]
    declared = {
        re.match(r"[\w.-]+", text)[0].lower() for project in projects() for text in metadata(project)["dependencies"]
    }  # type: ignore[index]
    assert declared - pinned == {project.name for project in projects()} & declared

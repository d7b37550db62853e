"""Addresses of the project in the metadata of its wheels (``scripts/wheels --url ...``)."""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import zipfile
from email.parser import Parser
from pathlib import Path
from types import ModuleType

import pytest
from workspace import ROOT

URL, FILES, DOCS = (
    "https://example.org/team/accel",
    "https://example.org/team/accel/blob/main",
    "https://example.org/docs",
)


@pytest.fixture(scope="module")
def project_urls() -> ModuleType:
    spec = importlib.util.spec_from_file_location("project_urls", ROOT / "scripts" / "project_urls.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_wheel_names_the_addresses(project_urls, tmp_path: Path) -> None:
    backend = pytest.importorskip("hatchling.build")
    package = tmp_path / "packages" / "accel-track"
    shutil.copytree(ROOT / "packages" / "accel-track", package, ignore=shutil.ignore_patterns("tests", "__pycache__"))
    with (package / "README.md").open("a") as file:
        file.write("[state](../accel-state#use), [log](CHANGELOG.md), [top](#accel-track), `[a](b)`\n")
    project_urls.main([str(tmp_path / "packages"), "--url", f"{URL}/", "--files", FILES, "--docs", DOCS])
    before = os.getcwd()
    os.chdir(package)
    try:
        wheel = backend.build_wheel(str(tmp_path))
    finally:
        os.chdir(before)
    with zipfile.ZipFile(tmp_path / wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        message = Parser().parsestr(archive.read(name).decode())
    assert message.get_all("Project-URL") == [
        f"Homepage, {URL}",
        f"Issues, {URL}/issues",
        f"Changelog, {FILES}/packages/accel-track/CHANGELOG.md",
        f"Documentation, {DOCS}",
    ]
    assert message.get_payload().endswith(
        f"[state]({FILES}/packages/accel-state#use), [log]({FILES}/packages/accel-track/CHANGELOG.md), "
        "[top](#accel-track), `[a](b)`\n"
    )


def test_what_is_refused(project_urls, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        project_urls.main([str(tmp_path), "--url", "example.org", "--files", FILES])
    assert "--url example.org: an address begins with https:// and a host" in capsys.readouterr().err
    package = tmp_path / "accel-track"
    package.mkdir()
    (package / "pyproject.toml").write_text("[project.urls]\n")
    with pytest.raises(SystemExit, match="has \\[project.urls\\] already"):
        project_urls.write(tmp_path, URL, FILES)


def test_the_repository_names_no_address() -> None:
    for project in ROOT.glob("packages/*/pyproject.toml"):
        assert "[project.urls]" not in project.read_text(encoding="utf-8"), project

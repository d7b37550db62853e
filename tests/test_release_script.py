"""scripts/release against a real package index on loopback: releases, upgrades, and what a sibling cannot take."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import release
from packaging.version import Version
from wheel_environment import empty_environment, linked, site_packages
from workspace import ROOT

from accel_state.ports import reserved_port

# Each release makes an environment or two, and asks the index what the packages require.
pytestmark = pytest.mark.timeout(1800)

PACKAGES = ("accel-state", "accel-data")


def _git(root: Path, *words: str) -> str:
    return subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    """A repository with two of the packages."""
    root = tmp_path / "workspace"
    for name in PACKAGES:
        source = ROOT / "packages" / name
        shutil.copytree(source, root / "packages" / name, ignore=shutil.ignore_patterns("__pycache__"))
    for words in (
        ("init", "--quiet"),
        ("config", "user.name", "Ada"),
        ("config", "user.email", "ada@example.org"),
        ("add", "."),
        ("commit", "--quiet", "-m", "start"),
    ):
        _git(root, *words)
    return root


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of an empty package index."""
    pytest.importorskip("pypiserver", reason="scripts/test --all installs it")
    # twine sends a name and a password; this index asks for none.
    monkeypatch.setenv("TWINE_USERNAME", "ada")
    monkeypatch.setenv("TWINE_PASSWORD", "secret")
    folder = tmp_path / "index"
    folder.mkdir()
    with reserved_port() as port:
        options = ["-i", "127.0.0.1", "-p", str(port), "-P", ".", "-a", ".", "--disable-fallback"]
        server = subprocess.Popen(
            [sys.executable, "-m", "pypiserver", "run", *options, str(folder)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        url = f"http://127.0.0.1:{port}"
        try:
            for _ in range(600):
                assert server.poll() is None, "the index ended"
                try:
                    urllib.request.urlopen(url, timeout=10).close()
                    break
                except OSError:
                    time.sleep(0.1)
            yield url
        finally:
            server.terminate()
            server.wait(60)


@pytest.fixture
def run(workspace: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run scripts/release in the repository, and return what it printed; ``refused`` expects exit code 1."""

    def call(*words: str, refused: bool = False) -> str:
        before = _git(workspace, "rev-parse", "HEAD")
        code = release.main([*words, "--root", str(workspace)])
        printed = capsys.readouterr()
        assert code == int(refused), printed.err
        assert _git(workspace, "status", "--porcelain") == "", "nothing is left half written"
        if refused:
            assert _git(workspace, "rev-parse", "HEAD") == before
        return printed.err if refused else printed.out

    return call


def _edit(workspace: Path, file: str, old: str, new: str) -> None:
    path = workspace / "packages" / file
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new, 1), encoding="utf-8")
    _git(workspace, "commit", "--quiet", "-am", "edit")


def _installed(python: Path, index: str, folder: Path, *wanted: str) -> dict[str, str]:
    """The versions of the packages after an installation from the index."""
    pip = [sys.executable, "-m", "pip", "--python", str(python), "-qq", "--disable-pip-version-check", "install"]
    subprocess.run([*pip, "--extra-index-url", f"{index}/simple/", *wanted], check=True, cwd=folder)
    code = f"import importlib.metadata as m; print(*map(m.version, {PACKAGES!r})); import accel_data.loader"
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True, cwd=folder, env=environment)
    return dict(zip(PACKAGES, done.stdout.split(), strict=True))


@pytest.mark.slow  # a minute or more of pip
def test_releases_against_an_index(workspace: Path, index: str, run: Callable[..., str], tmp_path: Path) -> None:
    target = ("--index", f"{index}/simple/", "--upload", index)
    # Two at once, in the order in which they require each other; the tests of accel-state run from its wheel.
    printed = run("accel-data", "accel-state", *target)
    assert re.findall(r"tagged (\S+)", printed) == ["accel-state-1.0.0", "accel-data-1.0.0"]
    assert set(_git(workspace, "tag").split()) == {"accel-state-1.0.0", "accel-data-1.0.0"}
    assert sorted(path.suffix for path in (tmp_path / "index").iterdir()) == [".gz", ".gz", ".whl", ".whl"]
    changelog = workspace / "packages" / "accel-state" / "CHANGELOG.md"
    assert "## 1.0.0 (20" in changelog.read_text(encoding="utf-8")
    (tmp_path / "torch").mkdir()
    torch, python = linked(["torch"], tmp_path / "torch"), empty_environment(tmp_path / "env")
    site_packages(python).joinpath("torch.pth").write_text(f"{torch}\n")
    assert _installed(python, index, tmp_path, "accel-data") == {"accel-state": "1.0.0", "accel-data": "1.0.0"}

    # The second release of one, which needs a section of the changelog and a version above the last one.
    assert "1.0.0 is tagged already" in run("accel-state", *target, refused=True)
    assert "Add `## 1.1.0`" in run("accel-state", "1.1.0", "--skip-tests", *target, refused=True)
    _edit(workspace, "accel-state/CHANGELOG.md", "## 1.0.0", "## 1.1.0\n\n## 1.0.0")
    assert "1.1.0 is empty" in run("accel-state", "1.1.0", "--skip-tests", *target, refused=True)
    _edit(workspace, "accel-state/CHANGELOG.md", "## 1.1.0\n", "## 1.1.0\n\n- It says hello.\n")
    run("accel-state", "1.1.0", "--skip-tests", *target)
    upgraded = _installed(python, index, tmp_path, "--upgrade", "accel-state")
    assert upgraded == {"accel-state": "1.1.0", "accel-data": "1.0.0"}

    # A major version that accel-data does not take: here, then as it is published.
    _edit(workspace, "accel-state/CHANGELOG.md", "## 1.1.0", "## 2.0.0\n\n- It says nothing.\n\n## 1.1.0")
    refused = run("accel-state", "2.0.0", "--skip-tests", *target, refused=True)
    assert "accel-data requires accel-state<2,>=1.0" in refused and "accel-data=VERSION" in refused
    _edit(workspace, "accel-data/pyproject.toml", "accel-state>=1.0,<2", "accel-state>=1.0,<3")
    refused = run("accel-state", "2.0.0", "--skip-tests", *target, refused=True)
    assert "the published accel-data 1.0.0 does not take accel-state 2.0.0" in refused
    _edit(workspace, "accel-data/CHANGELOG.md", "## 1.0.0", "## 1.1.0\n\n- Takes accel-state 2.\n\n## 1.0.0")
    run("accel-state=2.0.0", "accel-data=1.1.0", "--skip-tests", *target)
    text = (workspace / "packages" / "accel-data" / "pyproject.toml").read_text(encoding="utf-8")
    assert '"accel-state>=2.0,<3"' in text
    upgraded = _installed(python, index, tmp_path, "--upgrade", "accel-data")
    assert upgraded == {"accel-state": "2.0.0", "accel-data": "1.1.0"}


def test_what_is_refused_before_anything_is_built(workspace: Path, run: Callable[..., str]) -> None:
    assert "accel-stat" in run("accel-stat", refused=True)
    assert "'one' is not a version" in run("accel-state=one", refused=True)
    assert "below 1.0.0" in run("accel-state", "0.9.0", refused=True)
    _git(workspace, "tag", "accel-state-1.5.0")
    assert "1.5.0 is tagged already" in run("accel-state", "1.4.0", refused=True)
    (workspace / "packages" / "accel-data" / "README.md").write_text("changed")
    assert release.main(["accel-data", "--root", str(workspace)]) == 1
    assert _git(workspace, "diff", "--name-only") == "packages/accel-data/README.md"


def test_the_readme_gets_the_version_of_accel(tmp_path: Path) -> None:
    project = tmp_path / "packages" / "accel"
    shutil.copytree(ROOT / "packages" / "accel", project, ignore=shutil.ignore_patterns("__pycache__", "tests"))
    shutil.copy(ROOT / "README.md", tmp_path)
    release.write([release.Release(project, Version("1.7.0"))], "2026-12-24")
    assert " Version 1.7.0 ([changes](packages/accel/CHANGELOG.md))" in (tmp_path / "README.md").read_text("utf-8")


def test_the_order_of_a_release(workspace: Path) -> None:
    found = release.parse(["accel-data", "accel-state=1.2.0"], workspace)
    assert [one.tag for one in found] == ["accel-state-1.2.0", "accel-data-1.0.0"]

"""The files that hosts, editors and hooks read agree with the scripts and settings of the repository."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
from configparser import ConfigParser

import yaml
from workspace import ROOT, tomllib

RUN = ROOT / ".ci" / "run"


def _yaml(path: str) -> dict:
    content = yaml.safe_load(ROOT.joinpath(path).read_text(encoding="utf-8"))
    assert isinstance(content, dict), path
    return content


def _ruff() -> dict:
    return tomllib.loads(ROOT.joinpath("pyproject.toml").read_text(encoding="utf-8"))["tool"]["ruff"]


def test_the_workflow_runs_every_part_of_ci_run() -> None:
    text = RUN.read_text(encoding="utf-8")
    parts = re.findall(r"^#   (\w+) {2,}", text, re.MULTILINE)
    part = _yaml(".github/workflows/ci.yml")["jobs"]["part"]
    assert parts == part["strategy"]["matrix"]["part"] and len(parts) == 6
    assert part["steps"][-1]["run"].endswith("bash .ci/run ${{ matrix.part }}")
    assert f"ALL=({' '.join(parts)})" in text
    assert set(parts) <= set(re.findall(r"^(\w+)\(\) \{", text, re.MULTILINE))


def test_a_part_that_does_not_exist_is_refused() -> None:
    done = subprocess.run(["bash", str(RUN), "lint", "lnt"], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "lnt" in done.stderr and "lint" in done.stderr and done.stdout == ""


def test_issue_forms_have_what_a_host_requires() -> None:
    for name in ("bug", "feature"):
        form = _yaml(f".github/ISSUE_TEMPLATE/{name}.yml")
        assert form["name"] and form["description"]
        ids = [entry["id"] for entry in form["body"]]
        assert len(set(ids)) == len(ids) and all(entry["attributes"]["label"] for entry in form["body"])


def test_owned_paths_exist() -> None:
    lines = ROOT.joinpath(".github/CODEOWNERS").read_text(encoding="utf-8").splitlines()
    owned = [line.split()[0] for line in lines if line and not line.startswith("#")]
    assert "*" in owned
    for path in owned:
        assert list(ROOT.glob(path.strip("/"))), path


def test_hooks_run_programs_of_the_environment_on_files_that_exist() -> None:
    hooks = [hook for repo in _yaml(".pre-commit-config.yaml")["repos"] for hook in repo["hooks"]]
    assert {hook["id"] for hook in hooks} == {"ruff-check", "ruff-format", "boundaries"}
    for hook in hooks:
        program, *words = hook["entry"].split()
        assert program in (".venv/bin/ruff", ".venv/bin/python")
        assert all(ROOT.joinpath(word).exists() for word in words if word.startswith("tests/"))


def test_the_editor_uses_the_width_of_ruff() -> None:
    parser = ConfigParser()
    parser.read_string("[top]\n" + ROOT.joinpath(".editorconfig").read_text(encoding="utf-8"))
    assert parser.getint("*", "max_line_length") == _ruff()["line-length"]


def test_the_citation_and_the_container() -> None:
    citation = _yaml("CITATION.cff")
    assert {"cff-version", "message", "title", "authors"} <= set(citation) and citation["license"] == "Apache-2.0"
    container = json.loads(ROOT.joinpath(".devcontainer/devcontainer.json").read_text(encoding="utf-8"))
    for script in re.findall(r"scripts/(\w+)", container["postCreateCommand"]):
        assert ROOT.joinpath("scripts", script).exists(), script


def test_the_first_pages_name_the_version_and_the_repository() -> None:
    version = tomllib.loads((ROOT / "packages/accel/pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    assert f" Version {version} (" in (ROOT / "README.md").read_text(encoding="utf-8")
    facts = runpy.run_path(str(ROOT / "docs" / "generated.py"))["facts"]
    assert facts(ROOT, "") == f"Version {version} · Apache-2.0"
    url = "https://example.org/accel"
    assert facts(ROOT, url) == f"Version {version} · [Repository]({url}) · Apache-2.0"
    assert "\n<!-- facts -->\n" in (ROOT / "docs" / "index.md").read_text(encoding="utf-8")


def test_what_was_measured_is_on_the_pages() -> None:
    drawing = runpy.run_path(str(ROOT / "docs" / "measured.py"))
    results = json.loads(drawing["RESULTS"].read_text(encoding="utf-8"))
    assert drawing["CHART"].read_text(encoding="utf-8") == drawing["chart"](results)
    for page, picture in drawing["PAGES"].items():
        text = page.read_text(encoding="utf-8")
        assert drawing["replaced"](text, results, picture) == text, f"{page.name}: run `python docs/measured.py`"
        for row in results["rows"]:
            assert row["accel"] > 0 and drawing["shown"](row["accel"], row["unit"]) in text

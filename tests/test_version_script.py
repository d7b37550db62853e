"""The parts of scripts/test-versions: declared floors, interpreters, counted tests, the table of docs/hardware.md."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from version_environments import BEGIN, END, counts, floors, interpreters, with_row

REPORT = """<?xml version="1.0"?><testsuites>
<testsuite name="pytest" errors="1" failures="2" skipped="3" tests="20"></testsuite></testsuites>"""


def project(folder: Path, name: str, *dependencies: str, extra: Sequence[str] = ()) -> Path:
    file = folder / f"{name}.toml"
    text = f"[project]\nname = '{name}'\ndependencies = {list(dependencies)}\n"
    file.write_text(f"{text}[project.optional-dependencies]\nall = {list(extra)}\n")
    return file


def test_the_lowest_version_that_all_packages_accept(tmp_path: Path) -> None:
    first = project(tmp_path, "a", "accel-state>=1.0,<2", "numpy", "torch>=2.6", "s3[fast]>=9.1", "tqdm>=4.64,<5")
    second = project(tmp_path, "b", "torch>=2.10", "tqdm>=4.7", extra=["numpy>=1.26", "accel-data[all]>=1.0,<2"])
    # 2.10 is later than 2.6, and 4.64 later than 4.7. What has no lower bound is not pinned.
    assert floors([first, second]) == {"numpy": "1.26", "s3": "9.1", "torch": "2.10", "tqdm": "4.64"}


def test_interpreters_run() -> None:
    found = interpreters()
    assert found, "this one at least"
    for minor, path in found.items():
        version = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout
        assert version.startswith(f"Python 3.{minor}."), version


def test_tests_are_counted(tmp_path: Path) -> None:
    (tmp_path / "report.xml").write_text(REPORT)
    assert counts(tmp_path / "report.xml") == {"passed": 14, "failed": 3, "skipped": 3}


def test_a_row_replaces_the_one_of_the_same_run() -> None:
    page = f"before\n\n{BEGIN}\n{END}\n\nafter\n"
    first = ["lowest", "3.10", "2.6.0", "a", "1", "2", "3"]
    page = with_row(with_row(page, ["newest", "3.13", "2.14.0", "a", "6", "1", "0"]), first)
    page = with_row(page, ["newest", "3.13", "2.15.0", "a", "7", "0", "0"])  # another torch is newest by now
    again = with_row(page, [*first[:4], "4", "0", "3"])
    assert [line for line in again.splitlines() if line.startswith(("| lowest", "| newest"))] == [
        "| lowest | 3.10 | 2.6.0 | a | 4 | 0 | 3 |",
        "| newest | 3.13 | 2.15.0 | a | 7 | 0 | 0 |",
    ]
    assert again.startswith("before\n") and again.endswith("\nafter\n") and again.count("| versions |") == 1
    assert with_row(again, [*first[:4], "4", "0", "3"]) == again
    with pytest.raises(SystemExit, match="no lines"):
        with_row("nothing", first)

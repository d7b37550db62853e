"""How scripts/test-clients --suites reads the outcomes of tests and compares them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

CLIENTS = Path(__file__).parent / "clients"
SUITE = """
import pytest
from unittest import TestCase


def test_passes(): ...


def test_fails():
    raise KeyError("x: y")


def test_wrong():
    assert 1 == 2


@pytest.mark.skip
def test_skipped(): ...


class TestInside(TestCase):
    def test_passes(self): ...


@pytest.mark.parametrize("value", ["a.b::c", "d"])
def test_value(value):
    assert value != "d"
"""


@pytest.fixture
def suites(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(CLIENTS))
    monkeypatch.syspath_prepend(str(CLIENTS / "suites"))
    import run_suites

    return run_suites


def test_outcomes_have_ids_that_pytest_takes(suites, tmp_path: Path) -> None:
    tests = tmp_path / "tests"
    tests.mkdir()
    (tests / "test_some.py").write_text(SUITE, encoding="utf-8")
    (tests / "test_broken.py").write_text("import no_such_module", encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": ""}
    found = suites.run_tests(("tests",), sys.executable, tmp_path, environment, 60)
    some = "tests/test_some.py"
    broken = {name: result for name, result in found.items() if "broken" in name}
    assert {name: result for name, result in found.items() if name not in broken} == {
        f"{some}::test_passes": "passed",
        f"{some}::test_fails": "failed KeyError",
        f"{some}::test_wrong": "failed AssertionError",
        f"{some}::test_skipped": "skipped",
        f"{some}::TestInside::test_passes": "passed",
        f"{some}::test_value[a.b::c]": "passed",
        f"{some}::test_value[d]": "failed AssertionError",
    }
    assert len(broken) == 1 and next(iter(broken.values())).startswith("failed"), "a file that cannot be imported"
    again = (f"{some}::TestInside::test_passes", f"{some}::test_value[a.b::c]")
    assert suites.run_tests(again, sys.executable, tmp_path, environment, 60) == dict.fromkeys(again, "passed")


def test_a_difference_is_wrong_unless_it_is_known(suites, capsys: pytest.CaptureFixture[str]) -> None:
    suite = suites.Suite("pytest", ("tests",), known={"*::test_known": "a row of docs/migration.md"})
    ours = {"a::test_same": "failed KeyError", "a::test_known": "passed", "a::test_new": "failed KeyError"}
    theirs = {"a::test_same": "failed KeyError", "a::test_known": "failed TypeError", "a::test_new": "failed TypeError"}
    theirs["a::test_not_ours"] = "passed"
    assert suites.report(suite, ours, theirs) == ["a::test_new", "a::test_not_ours"]
    assert "WRONG: a::test_new" in capsys.readouterr().out
    assert suites.row(suite, ours, theirs).endswith("| 4 | 0 | 0 | 1 | 3 |")


def test_the_page_has_each_suite_and_no_difference(suites) -> None:
    page = (CLIENTS.parents[1] / "docs" / "guides" / "compat.md").read_text(encoding="utf-8")
    table = page.split("<!-- table of scripts/test-clients --suites -->")[1].split("<!-- end of the table -->")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if line.startswith("| ")]
    rows = [row for row in rows if not row[0].startswith("---")]
    assert [row[0] for row in rows] == ["suite", *(suite.name for suite in suites.SUITES)]
    for row in rows[1:]:
        tests, *outcomes = map(int, row[2:])
        assert tests == sum(outcomes) and outcomes[-1] == 0, row

"""The tables of scripts/test-clients in docs/guides/compat.md."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "clients"))
    import run

    return run


@pytest.mark.parametrize("option", ["", "--llmcompressor", "--suites"])
def test_a_table_goes_between_its_own_markers(run, option: str, tmp_path: Path) -> None:
    page, text = tmp_path / "compat.md", (ROOT / "docs" / "guides" / "compat.md").read_text(encoding="utf-8")
    page.write_text(text, encoding="utf-8")
    run.write_table(page, "| a table |", option)
    tables = [part.partition("<!-- end of the table -->")[0] for part in text.split("<!-- table of ")[1:]]
    changed = page.read_text(encoding="utf-8").split("<!-- table of ")[1:]
    wanted = [f"scripts/test-clients{' ' if option else ''}{option} -->" == part.partition("\n")[0] for part in changed]
    assert wanted.count(True) == 1
    for is_wanted, before, after in zip(wanted, tables, changed, strict=True):
        assert ("| a table |" in after) is is_wanted
        assert is_wanted or after.startswith(before)

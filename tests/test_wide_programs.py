"""The draw of scripts/test-clients --wide, without running a program: it follows from the seed, and the page has it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "clients" / "wide"))
selection = pytest.importorskip("selection")
PAGE = (ROOT / "docs" / "guides" / "compat-programs.md").read_text(encoding="utf-8")


def test_the_draw_follows_from_the_seed() -> None:
    names = selection.shuffled()
    assert len(names) >= 100
    assert sorted(names) == (selection.HERE / "candidates.txt").read_text(encoding="utf-8").split()
    assert names[:6] == [
        "x-evolution",
        "model-center",
        "stable-audio-tools",
        "tabpfn-extensions",
        "tuned-lens",
        "phosphobot",
    ]


def test_a_program_is_replaced_only_by_the_next_ones_and_with_a_reason() -> None:
    reasons = selection.replaced()
    assert all(reason.strip() for reason in reasons.values())
    drawn = [name for group in selection.drawn() for name in group]
    assert set(reasons) <= set(drawn), "a program that was not drawn has been replaced"
    assert selection.with_cases() <= set(selection.taken()), "there is a case of a program that was not drawn"


def test_the_page_has_each_program_once_with_its_version() -> None:
    rows = [line.split(" | ") for line in PAGE.splitlines() if line.startswith("| ")]
    tables = {cells[0].removeprefix("| "): cells for cells in rows}
    for name in selection.chosen():
        assert tables[name][1] == selection.versions()[name], name
        assert "equal" in tables[name][3], name
        on_two = tables[name][4].removesuffix(" |").strip()
        assert on_two.startswith(("equal", "one process only: ", "neither library can: ")), name
    for name, reason in selection.replaced().items():
        assert tables[name][1].removesuffix(" |") == reason, name
    for name in selection.waiting():
        assert f"`{name}`" in PAGE, f"{name} was drawn, and the page does not say that it has not been run"


def test_the_page_has_thirty_rows_and_compares_each() -> None:
    assert len(selection.chosen()) >= 30
    assert "not compared" not in PAGE.lower()


@pytest.mark.slow  # a case has to wait for its time limit, and the next one starts two more processes
def test_a_program_that_hangs_is_named_with_its_stacks_and_the_next_one_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "clients"))
    run = pytest.importorskip("run")
    (tmp_path / "stuck_cases.py").write_text(STUCK, encoding="utf-8")
    sources = [*(ROOT / "packages").glob("*/src"), ROOT / "packages" / "accel-compat" / "src" / "accel_compat" / "shim"]
    where = os.pathsep.join(map(str, [tmp_path, ROOT / "tests" / "clients", *sources]))
    monkeypatch.setitem(run.VARIABLES, "PYTHONPATH", where)
    monkeypatch.setenv("CASES_SECONDS", "15")
    results = run.run(sys.executable, {"stuck_cases.py": "stuck,answers"}, 2)
    assert results["stuck"]["error"].startswith("hangs in ")
    assert "waits_for_nobody (stuck_cases.py:" in results["stuck"]["error"]
    assert "barrier (" in results["stuck"]["error"], "where the other rank waits"
    assert results["answers"]["value"] == 42


STUCK = """
import threading, time
from harness import RANK, Cases

cases = Cases()
time.sleep(3 * RANK)  # the time of rank 0 is over first, and the launcher ends rank 1


@cases()
def stuck(folder):
    from accelerate import PartialState

    state = PartialState(cpu=True)
    if RANK == 1:
        waits_for_nobody()
    state.wait_for_everyone()


def waits_for_nobody():
    threading.Event().wait()


@cases()
def answers(folder):
    return 42
"""


def test_the_environment_names_a_version_of_each_program() -> None:
    assert set(selection.chosen()) <= set(selection.versions())

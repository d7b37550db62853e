"""docs/install.md has the row of each component, and each way to start ranks, that `scripts/test-components` runs.

The runs themselves compare what they print with the page: see tests/foreign/table.py.
"""

from __future__ import annotations

import ast
import re
import sys
from itertools import chain

import pytest
from packaging.requirements import Requirement
from workspace import ROOT

FOREIGN = ROOT / "tests" / "foreign"
sys.path.insert(0, str(FOREIGN))

import single_components  # noqa: E402
import starts  # noqa: E402
import table  # noqa: E402

PAGE = table.PAGE.read_text(encoding="utf-8")
ROWS = table.components(PAGE)
# scripts/test-megatron tests accel-megatron in an environment with Megatron-core.
NAMES = sorted(folder.name for folder in (ROOT / "packages").glob("accel-*") if folder.name != "accel-megatron")


def printed_by(program: str) -> list[re.Pattern[str]]:
    """What the print calls of a program write, as patterns; numbers are #, other values anything."""
    patterns = []
    for node in ast.walk(ast.parse((FOREIGN / program).read_text(encoding="utf-8"))):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"):
            continue
        (argument,) = node.args[:1]
        parts = argument.values if isinstance(argument, ast.JoinedStr) else [argument]
        texts = [re.escape(str(part.value)) if isinstance(part, ast.Constant) else ".+" for part in parts]
        pattern = re.sub(r"\d+(?:[.,]\d+)*", "#", "".join(texts))
        patterns += [re.compile(entry) for entry in pattern.split(re.escape("; "))]
    return patterns


def requirements(name: str) -> set[str]:
    """The siblings that a distribution requires, directly or not."""
    text = (ROOT / "packages" / name / "pyproject.toml").read_text(encoding="utf-8")
    listed = re.search(r"^dependencies = \[(.*?)^\]|^dependencies = \[(.*?)\]$", text, re.M | re.S)
    assert listed is not None, name
    found = {Requirement(each).name for each in re.findall(r'"([^"]+)"', listed[1] or listed[2])}
    own = {each for each in found if each == "accel" or each.startswith("accel-")}
    return own.union(*map(requirements, own))


def test_every_component_runs_alone_and_has_a_row() -> None:
    assert sorted(single_components.COMPONENTS) == sorted(ROWS) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_the_row_of_a_component_is_that_of_its_program(name: str) -> None:
    component, row = single_components.COMPONENTS[name], ROWS[name]
    expected = {single_components._plain_name(each) for each in component.foreign + component.slow}
    assert row.used == expected
    assert requirements(name) | {name} == {each for each in row.packages if each.startswith("accel")}
    patterns = printed_by(component.program)
    patterns += [re.compile(re.escape(single_components.STARTED.format("#")))] if component.starts else []
    assert all(any(pattern.fullmatch(entry) for pattern in patterns) for entry in row.ran), row.ran


def test_every_way_to_start_ranks_has_a_row() -> None:
    found = table.cells(PAGE, table.START_HEAD)
    assert list(found) == list(starts.STARTS)
    assert {result for _, result in found.values()} == {"equal"}


def test_a_run_that_differs_from_the_page_is_reported() -> None:
    printed = PAGE[PAGE.index(table.COMPONENT_HEAD) :]
    assert not list(table.differences(printed, PAGE, quick=False))
    other = printed.replace("accel-track | 3.7 MB", "accel-track | 9 MB", 1)
    assert not list(table.differences(other, PAGE, quick=False))  # sizes change
    for old, new, quick_too in (
        ("jsonl and a custom tracker", "jsonl", True),
        ("torchdata: nothing lost, exact resume; ", "", False),
        ("accel-track, packaging", "accel-track, numpy, packaging", True),
        ("webdataset 1", "petastorm 1", True),
        ("| mp.spawn, tcp:// | torch 2", "| other | torch 2", True),
    ):
        changed = re.sub(re.escape(old), new, printed, count=1)
        assert changed != printed, old
        for quick in (False, True):
            reported = list(chain(table.differences(changed, PAGE, quick)))
            assert bool(reported) == (quick_too or not quick), (old, quick, reported)

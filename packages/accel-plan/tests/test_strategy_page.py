"""docs/guides/choosing-a-strategy.md: its plans are those of `accel plan`, and its table has their figures."""

from __future__ import annotations

import re
from importlib.util import find_spec

import pytest
from documents import Command, all_commands, blocks, shows
from workspace import ROOT

from accel_plan.command import COMMAND

PAGE = "docs/guides/choosing-a-strategy.md"
PLANS = [command for command in all_commands() if command.block.page == PAGE and command.block.language == "text"]


@pytest.mark.skipif(find_spec("transformers") is None, reason="the models are those of transformers")
@pytest.mark.slow  # plans of large models, a minute on a core
@pytest.mark.timeout(300)
@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: " ".join(plan.words[3:7:2]))
def test_the_page_shows_what_the_command_prints(tmp_path, monkeypatch, capsys, plan: Command) -> None:
    monkeypatch.chdir(tmp_path)
    for block in blocks():
        if block.page == PAGE and block.title:
            (tmp_path / block.title).write_text(block.text, encoding="utf-8")
    assert COMMAND.run(plan.words[2:]) == 0
    printed = capsys.readouterr().out
    assert shows(plan.shown, printed), printed


def test_the_table_has_the_figures_of_the_plans() -> None:
    text = (ROOT / PAGE).read_text(encoding="utf-8")
    table = "\n".join(line for line in text.splitlines() if re.match(r"\| \d+B ", line))
    plans = "\n".join(plan.shown for plan in PLANS)
    figures = re.findall(r"([\d.,]+) (GiB|tokens/s)", table)
    assert len(figures) == 17 and len(PLANS) == 12
    for number, unit in figures:
        shown = f" {number} GiB" if unit == "GiB" else f"  {number} tokens per second and device"
        assert shown in plans, f"{number} {unit}"

"""Every link, command and snippet of the documentation works."""

from __future__ import annotations

import ast
import re
import subprocess
import textwrap
import time
from argparse import ArgumentParser
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest
from documents import Block, anchors, blocks, commands, links, pages
from forks import call_alone, run_alone
from run_snippets import run_page
from snippet_setup import NOT_RUN, RAISES, RUN_ELSEWHERE, SETUP
from workspace import ROOT, metadata, projects

import accel_launch.cli
from accel_launch.command import Command
from accel_launch.parser import parse
from accel_state.registry import Registry
from accel_state.testing import WorldError

SPEC = ROOT.parent / "shared" / "spec"


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    dead = []
    for target in links(page):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists():
            dead.append(f"{target}: no such file")
        elif anchor and file.suffix == ".md" and anchor not in anchors(file):
            dead.append(f"{target}: no such section")
    assert not dead, f"{page.relative_to(ROOT)}: {dead}"


def test_readmes_of_packages_link_to_nothing_outside() -> None:
    """On a package index relative links are dead."""
    for page in pages():
        if page.name == "README.md" and page.parent.parent.name == "packages":
            assert not [target for target in links(page) if not re.match(r"https?:|#", target)], page


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    for page in ROOT.glob("docs/**/*.md"):
        entries = re.findall(rf": {re.escape(str(page.relative_to(ROOT / 'docs')))}$", navigation, re.MULTILINE)
        assert len(entries) == 1, f"{page} is in the navigation {len(entries)} times"


def test_coverage_names_every_page_of_the_specification() -> None:
    page = ROOT / "docs" / "coverage.md"
    rows = dict(re.findall(r"^\| (\d\d-[\w.-]+) \| (.+) \|$", page.read_text(encoding="utf-8"), re.MULTILINE))
    assert [int(name[:2]) for name in rows] == list(range(57))
    for name, cell in rows.items():
        targets = re.findall(r"\]\(([^)]+)\)", cell)
        assert targets, name
        for target in targets:  # their files and sections: test_links_lead_somewhere
            assert target.partition("#")[0].endswith(".md"), target
    if SPEC.is_dir():
        assert set(rows) == {file.stem for file in SPEC.glob("*.md")}


class Parsed(Exception):
    """Raised in place of running a command whose arguments are valid."""


@pytest.mark.parametrize(
    ("block", "words"),
    [(block, words) for block, words in commands() if "accel" in words and words[0] not in ("pip", "cd", "conda")],
    ids=lambda value: str(value) if isinstance(value, Block) else None,
)
def test_command_is_valid(
    block: Block, words: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command exists and so do its options; scripts of the repository exist and have the options given to them."""
    words = words[words.index("accel") :]  # after variables, srun, mpirun, numactl
    name, arguments = words[1], [word for word in words[2:] if word not in ("...", "|", "grep")]
    if "|" in words:
        arguments = words[2 : words.index("|")]
    wrong = "--num_proceses" in arguments  # a README shows the error
    if name == "launch":
        if wrong:
            with pytest.raises(accel_launch.cli.ConfigurationError, match="num_processes"):
                parse(arguments)
            return
        if words[-1] != "...":
            _check_script(parse(arguments).script, parse(arguments).script_args)
        return
    command = _command(name)
    original = ArgumentParser.parse_args

    def parse_only(self: ArgumentParser, *args: object, **kwargs: object) -> None:
        original(self, *args, **kwargs)
        raise Parsed

    monkeypatch.setattr(ArgumentParser, "parse_args", parse_only)
    with pytest.raises(Parsed):
        command.run(arguments)


def _command(name: str) -> Command:
    """The command of a package of the workspace, which may not be installed (accel-megatron) but can be imported."""
    found = [metadata(project).get("entry-points", {}).get("accel.commands", {}) for project in projects()]
    targets = {key: target for group in found for key, target in group.items()}
    known = accel_launch.cli.COMMANDS
    return Registry("command", targets).load(name) if name in targets else known.load(name)


def _check_script(script: str, arguments: list[str]) -> None:
    if not script.startswith("examples/"):
        return
    source = (ROOT / script).read_text(encoding="utf-8")
    for word in arguments:
        if word.startswith("--"):
            assert f'"{word}"' in source, f"{script} has no option {word}"


def test_other_commands_exist() -> None:
    known = {"python", "pip", "torchrun", "conda", "source", "cd", "cat", "echo", "srun", "mpirun", "numactl"}
    for block, words in commands():
        program = next(word for word in words if not re.fullmatch(r"[A-Z_]+=\S*", word))
        if program.startswith("scripts/"):
            assert (ROOT / program).is_file(), f"{block}: {program}"
        elif program not in {"accel", *known} and not program.startswith("accel-"):
            # Shell syntax of job scripts: its syntax is checked as a whole.
            assert subprocess.run(["bash", "-n", "-c", block.text], check=False).returncode == 0, str(block)


def test_python_blocks_are_python() -> None:
    for block in blocks():
        if block.language == "python":
            compile(block.text, str(block), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


def test_the_setup_of_snippets_is_used() -> None:
    """Every entry belongs to a snippet that is still there."""
    for page, start in [*SETUP, *RAISES, *NOT_RUN]:
        assert any(block.page == page and block.text.startswith(start) for block in blocks()), (page, start)


def of_block(table: dict[tuple[str, str], str], block: Block) -> str | None:
    """The entry of the table for this block."""
    return next(
        (value for (page, start), value in table.items() if page == block.page and block.text.startswith(start)), None
    )


def snippets(pattern: str = "") -> dict[str, list[dict[str, object]]]:
    """What run_snippets.py runs for each page whose name contains the pattern, in order."""
    by_page: dict[str, list[dict[str, object]]] = defaultdict(list)
    previous: Block | None = None
    for block in blocks():
        items = by_page[block.page]
        if block.page in RUN_ELSEWHERE or not re.search(pattern, block.page):
            continue
        at_previous = previous is not None and items and items[-1].get("at") == str(previous)
        if re.fullmatch(r"[\w/]+\.\w+", block.title):
            items.append({"file": block.title, "text": block.text})
        elif block.language == "python" and of_block(NOT_RUN, block) is None:
            item = {"code": block.text, "at": str(block), "setup": of_block(SETUP, block) or ""}
            items.append({**item, "raises": of_block(RAISES, block), "expected": None})
        elif block.language == "text" and block.follows and at_previous and not items[-1].get("raises"):
            items[-1]["expected"] = block.text
        previous = block
    return by_page


@pytest.mark.slow  # runs every snippet of the documentation, in a process for each page
@pytest.mark.timeout(600)
def test_snippets_run(tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    failures = []
    for page, items in snippets().items():
        if items:
            start = time.perf_counter()
            try:
                failures += call_alone(run_page, items, tmp_path, seconds=120)
            except WorldError as error:
                failures.append(f"{page}: {error}")
            seconds = time.perf_counter() - start
            record_property("documented run", f"{seconds:6.1f} s  {page}: {len(items)} snippets")
    assert not failures, "\n\n".join(failures)


@pytest.mark.slow  # two scripts of a page; its other snippets run in test_snippets_run
def test_the_migrated_script_prints_what_the_original_prints(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    found = {}
    for block in blocks():
        if block.page == "docs/tutorials/migrate-a-script.md" and block.title:
            (tmp_path / block.title).write_text(block.text, encoding="utf-8")
            found[block.title] = run_alone(tmp_path / block.title, folder=tmp_path)
    assert set(found) == {"before.py", "after.py"}
    assert found["before.py"] == found["after.py"] and found["after.py"].endswith("of 360\n")
    assert (tmp_path / "out" / "model.safetensors").is_file()


TAB_PROGRAM = """
import sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from accel import Accelerator, ProjectConfiguration

sys.stderr = sys.stdout
batches, epochs, model = int(sys.argv[1]), 2, nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)
loader = DataLoader(TensorDataset(torch.ones(120, 2), torch.ones(120, 1)))
"""
TAB_STEP = """batches -= 1
        if batches < 0:
            raise StopIteration
        accelerator.backward((model(inputs) - targets).square().mean())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()"""


def test_the_tab_of_checkpoints_is_complete(tmp_path: Path) -> None:
    """Its lines run as they are: a run that ends after 103 of 120 batches continues after the 100th."""
    page = (ROOT / "docs" / "tutorials" / "index.md").read_text(encoding="utf-8")
    tab = page.partition('=== "Checkpoints"')[2].partition("```diff\n")[2].partition("    ```")[0]
    lines = [line[6:] for line in tab.splitlines() if not line.startswith("    -")]
    script = tmp_path / "script.py"
    code = textwrap.indent("\n".join(lines).replace("...", TAB_STEP), "    ")
    script.write_text(f"{TAB_PROGRAM}try:\n{code}\nexcept StopIteration:\n    pass\n")
    assert "found no state" in run_alone(script, 103, folder=tmp_path)
    assert "checkpoint_0, after 100 samples of epoch 0" in run_alone(script, 20 + 103, folder=tmp_path)
    assert "checkpoint_1, after 100 samples of epoch 1" in run_alone(script, 20, folder=tmp_path)
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == [
        "checkpoint_0",
        "checkpoint_1",
    ]

"""What a type checker says about the code of users."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import get_args

import pytest
from type_completeness import count_any, incomplete, verify
from workspace import environment

from accel.setup.registry import STRATEGIES, StrategyName
from accel_state.enums import RNGName, RNGType
from accel_track.enums import LoggerName, LoggerType

SCRIPT = Path(__file__).with_name("strict_script.py")


def _wrong_lines(found: set[int], output: str) -> str:
    """How the lines with errors differ from those that are marked; empty if they do not."""
    lines = SCRIPT.read_text(encoding="utf-8").splitlines()
    marked = {number for number, line in enumerate(lines, 1) if line.endswith("# error")}
    assert len(marked) >= 15
    differing = sorted(found ^ marked)
    return "".join(f"{number}: {lines[number - 1]}\n" for number in differing) + output if differing else ""


def test_words_for_type_checkers_are_those_that_are_allowed() -> None:
    assert list(get_args(RNGName)) == RNGType.list()
    assert list(get_args(LoggerName)) == LoggerType.list()
    own = {name for name in STRATEGIES if STRATEGIES.target(name).startswith("accel.")}
    assert set(get_args(StrategyName)) == own


@pytest.mark.slow  # mypy reads torch
@pytest.mark.timeout(300)
@pytest.mark.skipif(find_spec("mypy") is None, reason="needs mypy")
def test_a_strict_script_has_the_errors_that_mypy_should_find(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--cache-dir", str(tmp_path), str(SCRIPT)]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True)
    found = {int(line) for line in re.findall(r"strict_script\.py:(\d+): error: ", done.stdout)}
    assert not _wrong_lines(found, done.stdout + done.stderr)


@pytest.mark.skipif(find_spec("pyright") is None, reason="needs pyright")
def test_a_strict_script_has_the_errors_that_pyright_should_find(tmp_path: Path) -> None:
    shutil.copy(SCRIPT, tmp_path)
    (tmp_path / "pyrightconfig.json").write_text('{"typeCheckingMode": "strict"}')
    command = [sys.executable, "-m", "pyright", "--project", str(tmp_path), "--pythonpath", sys.executable]
    done = subprocess.run([*command, "--outputjson"], cwd=tmp_path, env=environment(), capture_output=True, text=True)
    report = json.loads(done.stdout)["generalDiagnostics"]
    found = {item["range"]["start"]["line"] + 1 for item in report if item["severity"] == "error"}
    assert not _wrong_lines(found, done.stdout + done.stderr)


@pytest.mark.skipif(find_spec("pyright") is None, reason="needs pyright")
def test_what_has_no_type_in_a_package_is_listed(tmp_path: Path) -> None:
    package = tmp_path / "half_typed"
    package.mkdir()
    (package / "py.typed").touch()
    (package / "__init__.py").write_text(
        "from typing import Any, overload\n"
        "class Sizes:\n"
        "    def __init__(self, text: str) -> None:\n"
        "        self.length = len(text)\n"
        "        self.text: str = text\n"
        "def convert(value: Any, _depth: int = 0) -> Any: return value\n"
        "@overload\n"
        "def same(value: int) -> int: ...\n"
        "@overload\n"
        "def same(value: str) -> str: ...\n"
        "def same(value: Any) -> Any: return value\n"
    )
    report = verify("half_typed", tmp_path)
    assert 0.5 < report["completenessScore"] < 0.9
    (symbol, *_), (owner, *_) = sorted((line.split() for line in incomplete(report)), key=lambda words: -len(words[0]))
    assert (symbol, owner) == ("half_typed.Sizes.length:", "half_typed.Sizes:")
    assert count_any(package) == 2

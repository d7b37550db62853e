"""What a type checker says about the code of users."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args

import pytest
from documents import blocks
from run_snippets import PRELUDE
from snippet_setup import SETUP
from type_completeness import count_any, incomplete, verify
from workspace import ROOT, environment

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
    errors = _pyright(tmp_path, typeCheckingMode="strict")
    assert not _wrong_lines({line for _, line, _ in errors}, "\n".join(f"{line}: {text}" for _, line, text in errors))


def _pyright(folder: Path, **configuration: Any) -> list[tuple[str, int, str]]:
    """Return the file, the line and the message of each error that pyright finds in a folder."""
    (folder / "pyrightconfig.json").write_text(json.dumps(configuration))
    command = [sys.executable, "-m", "pyright", "--project", str(folder), "--pythonpath", sys.executable]
    done = subprocess.run([*command, "--outputjson"], cwd=folder, env=environment(), capture_output=True, text=True)
    return [
        (str(Path(item["file"]).relative_to(folder)), item["range"]["start"]["line"] + 1, item["message"])
        for item in json.loads(done.stdout)["generalDiagnostics"]
        if item["severity"] == "error"
    ]


_FUTURE = "from __future__ import annotations\n"
# Errors, with their file, that are not those of accel's types: these examples run.
_EXPECTED = [
    r'parameter "dataset" of type "Dataset\[',  # torch: a loader reads any sequence
    # torch: attributes of a module are Tensor | Module, and those of sharded parameters are unknown
    r'"(Unknown \| )?Tensor \| Module"|for class "(Tensor|Parameter)"|type "Tensor" is not callable',
    r'No overloads for "join"',  # the same: joins an attribute of a module
    r'types "Tensor \| None"',  # torch: the gradient, after the backward pass
    r'No parameter named "(attn_implementation|head_dim|num_labels)"',  # transformers: fields of every configuration
    r'"(GPT2LMHeadModel|LlamaForCausalLM)"',  # transformers: protocols that its own models do not fit
    r'Import "(accelerate|datasets|megatron\.core|ray\.train|torch_xla|trl)\b',  # of other environments
    r'"splitlines" is not a known attribute of "None"',  # the docstring of an example
    # docs/guides/types.md: names of other packages' trackers, and what has more than its type after `prepare`
    r"Literal\['sqlite'\]",
    r'^docs__.*"(iteration|steps_taken)" for class "(DataLoader\[.*|SGD)"',
]


def _write_documented_code(folder: Path) -> None:
    """Write the examples, and the Python snippets of each page as one module, into a folder."""
    shutil.copytree(ROOT / "examples", folder / "examples")
    texts: dict[str, str] = defaultdict(lambda: _FUTURE + PRELUDE)
    for block in blocks():
        if block.language != "python":
            continue
        if "/" in block.title:  # a module of a package
            (folder / block.title).parent.mkdir(exist_ok=True)
            (folder / block.title).write_text(block.text, encoding="utf-8")
            continue
        # What the page leaves out, such as a model.
        setup = [SETUP[page, start] for page, start in SETUP if page == block.page and block.text.startswith(start)]
        code = "\n".join([*setup, block.text]).replace("fresh\n", PRELUDE)
        texts[block.page] += f"# {block}\n{code.replace(_FUTURE, '')}\n"
    for page, text in texts.items():
        (folder / f"{page.replace('/', '__')}.py").write_text(text, encoding="utf-8")


@pytest.mark.slow  # pyright reads torch and transformers: half a minute of one core
@pytest.mark.timeout(600)
@pytest.mark.skipif(find_spec("pyright") is None, reason="needs pyright")
def test_pyright_finds_no_error_of_accel_in_the_examples_and_the_snippets(tmp_path: Path) -> None:
    _write_documented_code(tmp_path)
    errors = _pyright(
        tmp_path,
        typeCheckingMode="basic",
        extraPaths=[str(ROOT / "packages" / "accel-megatron" / "src")],
        # A page's snippets are one module here: they leave names out, and define the same ones again.
        reportUndefinedVariable="none",
        reportRedeclaration="none",
    )
    assert len(errors) > 20  # those of other libraries
    found = [
        f"{file}:{line}: {message}\n    {(tmp_path / file).read_text(encoding='utf-8').splitlines()[line - 1].strip()}"
        for file, line, message in errors
        if not any(re.search(pattern, f"{file}: {message}") for pattern in _EXPECTED)
    ]
    assert not found, "\n".join(found)


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

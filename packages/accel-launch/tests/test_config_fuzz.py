"""Random and malformed files, variables and command lines: never a traceback, always a message, and no file is ever
damaged.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from accel_launch.cli import main
from accel_launch.config.read import load_settings, read_config
from accel_launch.config.update import update_file
from accel_state.errors import ConfigurationError
from accel_state.options.registry import all_options

OPTIONS = all_options()
KEYS = sorted({key for opt in OPTIONS.values() for key in opt.keys})
FLAGS = sorted({flag for opt in OPTIONS.values() for flag in (*opt.flags, *opt.undo_flags)})
# Text with which the launcher would start another program, or connect to another machine.
RUNS = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])

words = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=12)
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    words,
    st.dates(),
    st.sampled_from(["no", "yes", "true", "NO", "auto", "-1", "1e9", "~x"]),
)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3), max_leaves=5
)
good = st.sampled_from(
    sorted({str(choice) for opt in OPTIONS.values() for choice in opt.choices or ("1", "2", "true")})
)
typos = st.sampled_from(KEYS).map(lambda key: key[:-1] or "x")


@st.composite
def mappings(draw: st.DrawFn) -> dict[Any, Any]:
    """Known and unknown keys, with values that fit and that do not."""
    content: dict[Any, Any] = {}
    for key in draw(st.lists(st.sampled_from(KEYS) | typos | words | st.integers(), max_size=6)):
        section, _, inner = str(key).partition(".")
        value = draw(values | good)
        if inner and isinstance(content.setdefault(section, {}), dict):
            content[section][inner] = value
        else:
            content[key] = value
    return content


def _dump(content: dict[Any, Any]) -> str:
    return str(yaml.safe_dump(content, allow_unicode=True))


texts = st.one_of(
    mappings().map(_dump),
    mappings().map(lambda content: json.dumps(content, default=str, skipkeys=True)),
    # Cut off somewhere, or with something foreign in it.
    st.tuples(mappings().map(_dump), st.integers(0, 200), words).map(
        lambda parts: parts[0][: parts[1]] + parts[2] + parts[0][parts[1] :]
    ),
    st.text(st.sampled_from("{}[]:,-&*!|>'\"%@` \n\tab1#?"), max_size=40),
    words,
).map(lambda text: text.encode())
contents = texts | st.binary(max_size=60)


@pytest.fixture(autouse=True)
def _no_default_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    # --no_python with the name of a program ("true", "w") would replace this process by it.
    monkeypatch.setenv("PATH", str(tmp_path / "no-programs"))
    monkeypatch.chdir(tmp_path)


def call(argv: list[str]) -> tuple[int, str, str]:
    """Run the command in this process; an exception is a traceback that a user would see."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(argv)
        except SystemExit as leaving:
            code = int(leaving.code or 0)
    return code, out.getvalue(), err.getvalue()


def check_refused(result: tuple[int, str, str]) -> None:
    """A message of one line, and the exit code of a usage error."""
    code, _, errors = result
    assert code == 2 and ": error: " in errors and len(errors.strip()) > 30, result
    assert errors.rstrip("\n").splitlines()[-1].startswith("accel") and "Traceback" not in errors


@contextlib.contextmanager
def unchanged(path: Path) -> Iterator[None]:
    """Nothing is written, and nothing is left behind."""
    before, beside = path.read_bytes(), sorted(os.listdir(path.parent))
    yield
    assert path.read_bytes() == before and sorted(os.listdir(path.parent)) == beside


@pytest.mark.slow  # 120 examples of several commands each; test_update_of_any_file_is_atomic is fast
@settings(RUNS, max_examples=120)
@given(contents, st.sampled_from([".yaml", ".json"]))
@example(b"a: &x {b: *x}", ".yaml")
@example(b"? {a: 1}\n: 2", ".yaml")
@example(b"# a\n\n{num_processes: 2, # b\n# c\nfp16: true}  # d\n# e", ".yaml")
@example(b"role: |  # a\n  x # b\n# c\nmain_training_function: >-\n  y\n\n  # d\n", ".yaml")
@example(b"num_processes: &n 2 # a\nrole: '\n  # b'  # c\n", ".yaml")
@example(b"<<: 3\n", ".yaml")
@example(b"!!python/object/apply:os.system [x]", ".yaml")
@example(b"num_processes: 0x" + b"f" * 5000, ".yaml")
@example(b"num_processes: 1:30:00\n", ".yaml")
@example(b"[" * 3000, ".json")
@example(b"compute_environment: AMAZON_SAGEMAKER\n", ".yaml")
@example(b"a: !!binary x", ".yaml")
@example(b"a: !!timestamp x", ".yaml")
@example(b"a: !!int x\n", ".yaml")
@example(b"additional_args: {1: {2: 3}}\n", ".yaml")
@example(b"main_process_ip: []\n", ".yaml")
@example(b'role: "\\ud800"\n', ".yaml")
@example(b'role: "\\udcff"\n', ".json")
@example('role: "\N{GREEK SMALL LETTER ALPHA}"'.encode(), ".yaml")
def test_files(tmp_path: Path, content: bytes, suffix: str) -> None:
    """Every command that reads the file agrees on whether it is valid; only `update` writes, and only a valid file."""
    path = tmp_path / f"c{suffix}"
    path.write_bytes(content)
    try:
        settings_before = load_settings({"config_file": str(path)}, environ={})
    except ConfigurationError:
        with unchanged(path):
            check_refused(call(["config", "show", "--config_file", str(path)]))
            check_refused(call(["launch", "--config_file", str(path), "no-such-script.py"]))
    else:
        with unchanged(path):
            assert call(["config", "show", "--config_file", str(path)])[0] == 0
            check_refused(call(["launch", "--config_file", str(path), "no-such-script.py"]))
        assert call(["config", "update", "--config_file", str(path)])[0] == 0
        after = load_settings({"config_file": str(path)}, environ={})
        same = [name for name, setting in settings_before.settings.items() if not setting.option.retired]
        assert {name: after[name] for name in same} == {name: settings_before[name] for name in same}
    with contextlib.suppress(FileNotFoundError):
        Path(f"{path}.bak").unlink()


@settings(RUNS, max_examples=80)
@given(contents)
def test_update_of_any_file_is_atomic(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "u.yaml"
    path.write_bytes(content)
    try:
        read_config(path)
    except ConfigurationError:
        with unchanged(path), pytest.raises(ConfigurationError):
            update_file(path, path)
    else:
        update_file(path, path)
        assert isinstance(yaml.safe_load(path.read_text(encoding="utf-8")), dict)
        assert read_config(path) is not None
    with contextlib.suppress(FileNotFoundError):
        Path(f"{path}.bak").unlink()


arguments = st.lists(
    st.one_of(
        st.sampled_from(FLAGS),
        st.sampled_from(FLAGS).map(lambda flag: flag[:-1]),
        st.tuples(st.sampled_from(FLAGS), good | words).map("=".join),
        words,
        good,
        st.sampled_from(["-", "--", "---", "-q", "-t", "-t9", "--=", "-m", "=", "--num_processes=", "-1"]),
    ),
    max_size=6,
).map(lambda parts: [part.replace("\0", "") for part in parts])


def _asks_for_help(argv: list[str]) -> bool:
    return any(word in ("-h", "--help") for word in argv)


@settings(RUNS, max_examples=150)
@given(arguments)
@example(["--command", "[1"])
@example(["--main_process_port", "\N{SUPERSCRIPT TWO}"])
@example(["--num_processes", "\N{ARABIC-INDIC DIGIT THREE}"])
@example(["--sagemaker_additional_args", "{" * 500])
@example(["--gpu_ids", "\N{SUPERSCRIPT TWO}"])
@example(["--tee", "9" * 5000 + ":1"])
def test_command_lines_of_show(argv: list[str]) -> None:
    if _asks_for_help(argv):
        return
    result = call(["config", "show", *argv])
    assert result[0] == 0 or check_refused(result) is None


@settings(RUNS, max_examples=150)
@given(arguments)
@example(["--config_file", "~nobody-of-this-name/x.yaml"])
@example(["-m", "--quiet"])
@example(["--num_processes", "999999999999999999999"])
def test_command_lines_of_launch(argv: list[str]) -> None:
    """There is no such script, so nothing is ever started, and every command line ends in a message."""
    if not _asks_for_help(argv):
        check_refused(call(["launch", *argv, "--dry_run=false", "no-such-script.py"]))


@settings(RUNS, max_examples=100)
@given(st.sampled_from(sorted({str(opt.env) for opt in OPTIONS.values() if opt.env})), good | words)
def test_variables(monkeypatch: pytest.MonkeyPatch, name: str, text: str) -> None:
    with monkeypatch.context() as context:
        context.setenv(name, text)
        result = call(["config", "show", "--json"])
    if result[0] == 0:
        json.loads(result[1])
    else:
        check_refused(result)


@settings(RUNS, max_examples=50)
@given(arguments, st.sampled_from(["", "default", "update", "env", "shwo"]))
def test_command_lines_of_the_others(tmp_path: Path, argv: list[str], part: str) -> None:
    """The questionnaire has no input here, so it never writes either."""
    if _asks_for_help(argv) or part == "default":
        return
    path = tmp_path / "mine.yaml"
    path.write_text("num_proceses: 2\n")
    with unchanged(path):
        head = ["env"] if part == "env" else ["config", *([part] if part else [])]
        check_refused(call([*head, *argv, "--config_file", str(path), "--no-such-option"]))

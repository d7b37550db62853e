"""The names of the reference are in accel, with the same parameters and defaults (tests/facts/reference_api.json)."""

from __future__ import annotations

import dataclasses
import enum
import importlib
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from workspace import environment

ROOT = Path(__file__).parent.parent
TABLE = json.loads(Path(__file__).parent.joinpath("facts", "reference_api.json").read_text(encoding="utf-8"))


def _find(path: str) -> Any:
    """The object at ``accel.module.Name`` or ``accel.module.Class.member``.

    Raises:
        LookupError: it does not exist; the message names the missing part.
    """
    parts = path.split(".")
    found: Any = importlib.import_module(parts[0])
    for depth, part in enumerate(parts[1:], start=2):
        try:
            found = getattr(found, part)
        except AttributeError:
            try:
                found = importlib.import_module(".".join(parts[:depth]))
            except ModuleNotFoundError:
                raise LookupError(f"{'.'.join(parts[:depth])} does not exist") from None
    return found


def _parameters(target: Any) -> list[inspect.Parameter]:
    parameters = list(inspect.signature(target).parameters.values())
    return parameters[1:] if parameters and parameters[0].name == "self" else parameters


def _differences(target: Any, expected: list[list[Any]]) -> list[str]:
    """How a signature differs from the facts; additional parameters may follow."""
    own = {_key(parameter): parameter for parameter in _parameters(target)}
    # The name behind stars does not matter: no caller writes it.
    expected = [[re.sub(r"(?<=\*)\w+", "", name), *default] for name, *default in expected]
    positional = [name for name, parameter in own.items() if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    wanted = [name for name, *_ in expected if not name.startswith("*")]
    differences = []
    after_stars = False
    for name, *default in expected:
        if name not in own:
            differences.append(f"no parameter {name}")
        elif default and (complaint := _default_differs(own[name].default, default[0])):
            differences.append(f"{name}: {complaint}")
        elif not default and own[name].default is not inspect.Parameter.empty:
            differences.append(f"{name}: has the default {own[name].default!r}, the reference has none")
        after_stars = after_stars or name.startswith("*")
        if (
            not after_stars
            and name in own
            and (positional[wanted.index(name)] if wanted.index(name) < len(positional) else None) != name
        ):
            differences.append(f"{name}: is not positional parameter {wanted.index(name)}; the order is {positional}")
    required = [
        name
        for name, parameter in own.items()
        if _is_required(parameter) and name not in {entry[0] for entry in expected}
    ]
    return differences + [f"{name}: required, and not a parameter of the reference" for name in required]


def _key(parameter: inspect.Parameter) -> str:
    return {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, parameter.name)


def _is_required(parameter: inspect.Parameter) -> bool:
    return parameter.default is parameter.empty and parameter.kind not in {
        parameter.VAR_POSITIONAL,
        parameter.VAR_KEYWORD,
    }


def _default_differs(actual: Any, expected: Any) -> str:
    if actual is inspect.Parameter.empty:
        return f"has no default, the reference has {expected!r}"
    if expected == {"any": True}:
        return ""
    if isinstance(expected, dict):
        expected = tuple(expected["tuple"])
    if isinstance(actual, enum.Enum):
        actual = actual.value
    # 1 == True and 1.0 == 1, yet a user who reads the signature sees different things.
    same = actual == expected and (isinstance(actual, bool) == isinstance(expected, bool))
    return "" if same else f"the default is {actual!r}, of the reference {expected!r}"


def _check(path: str, fact: dict[str, Any]) -> list[str]:
    """Every complaint about one name and its members, each with its path."""
    try:
        target = _find(path)
    except LookupError as error:
        return [str(error)]
    complaints = []
    if fact["kind"] == "enum":
        actual = {member.name: member.value for member in target}
        complaints = [
            f"{path}.{name} is {actual.get(name)!r}, not {value!r}"
            for name, value in fact["values"].items()
            if actual.get(name) != value
        ]
    elif fact["kind"] == "class" and not inspect.isclass(target):
        complaints.append(f"{path} is {target!r}, not a class")
    elif "parameters" in fact:
        complaints = [f"{path}({difference})" for difference in _differences(target, fact["parameters"])]
    return complaints + [
        complaint
        for name, member in fact.get("members", {}).items()
        for complaint in _check_member(path, target, name, member)
    ]


def _check_member(path: str, owner: Any, name: str, fact: dict[str, Any]) -> list[str]:
    fields = {field.name for field in dataclasses.fields(owner)} if dataclasses.is_dataclass(owner) else set()
    if not hasattr(owner, name) and not hasattr(owner, "__getattr__") and name not in fields:
        return [f"{path}.{name} does not exist"]
    if fact["kind"] == "property":
        value = inspect.getattr_static(owner, name, None)
        return [f"{path}.{name} is a method, not a property"] if inspect.isfunction(value) else []
    parameters = fact.get("parameters")
    return (
        []
        if parameters is None
        else [f"{path}.{name}({difference})" for difference in _differences(getattr(owner, name), parameters)]
    )


def test_names_parameters_and_defaults_are_those_of_the_reference() -> None:
    complaints = [complaint for path, fact in TABLE["names"].items() for complaint in _check(path, fact)]
    assert not complaints, "\n".join(complaints)


@pytest.mark.parametrize("path", sorted(TABLE["not in this version"]))
def test_names_listed_as_missing_are_missing(path: str) -> None:
    module = ".".join(path.split(".")[:-1])
    try:
        _find(module)
        _find(path)
    except LookupError:
        return
    pytest.fail(f'{path} exists now. Move it to "names" in tests/facts/reference_api.json, with its parameters.')


def test_the_check_detects_a_difference() -> None:
    def function(first: int, second: int = 2, *, third: bool = True) -> None: ...

    assert _differences(function, [["first"], ["second", 2]]) == []
    assert _differences(function, [["first"], ["second", 3]]) == ["second: the default is 2, of the reference 3"]
    assert _differences(function, [["second", 2], ["first"]])[0].startswith("second: is not positional parameter 0")
    assert _differences(lambda *a, **k: None, [["*args"], ["**kwargs"]]) == []
    assert _differences(function, [["first"], ["other"]]) == ["no parameter other"]
    assert _differences(function, [["second", 2]])[-1] == "first: required, and not a parameter of the reference"
    assert "third: the default is True, of the reference 1" in _differences(
        function, [["first"], ["second", 2], ["third", 1]]
    )


def compare_modules() -> list[str]:
    """Every complaint about the modules of the reference under accel-compat, each name where the reference lists it."""
    complaints = []
    for module, names in TABLE["listed in"].items():
        for name, home in names.items():
            if home not in TABLE["names"]:
                complaints.append(f"{module}.{name} is missing")
                continue
            complaints += _check(f"{module}.{name}", TABLE["names"][home])
    return complaints


def names_without_a_counterpart() -> list[str]:
    """The names that accel-compat has only to refuse them when they are used."""
    from accel_compat.modules import Unavailable

    found = []
    for module, names in TABLE["listed in"].items():
        for name in names:
            value = getattr(importlib.import_module(module), name)
            if isinstance(value, type) and issubclass(value, Unavailable):
                found.append(f"{module}.{name} is missing")
    return found


def test_every_difference_says_what_a_client_sees() -> None:
    page = ROOT.joinpath("docs", "migration.md").read_text(encoding="utf-8")
    tables = page.partition("## What differs")[2].partition("## Not available")[0]
    rows = [line.strip("| ").split("|") for line in tables.splitlines() if line.startswith("|")]
    assert len(rows) > 80 and {row[-1].strip() for row in rows[:1]} == {"what existing code sees"}
    assert [row[0] for row in rows if len(row) != 5 or not row[-1].strip()] == []


def test_the_modules_of_the_reference_under_the_compatibility_layer_lack_only_what_the_documentation_explains() -> None:
    # In a process of its own: `accelerate` stays imported.
    code = (
        "import json, accel_compat; accel_compat.install(); import test_reference_api as t;"
        "print(json.dumps([t.compare_modules(), t.names_without_a_counterpart()]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parent, capture_output=True, text=True, env=environment()
    )
    assert done.returncode == 0, done.stderr
    complaints, absent = json.loads(done.stdout.splitlines()[-1])
    assert complaints == absent  # nothing else differs, and each name that is missing can be imported
    missing = {path.replace("accel", "accelerate", 1) for path in TABLE["not in this version"]}
    page = ROOT.joinpath("docs", "migration.md").read_text(encoding="utf-8").partition("## Not available")[2]
    assert set(re.findall(r"`(accelerate\.[\w.]+)`", page)) == missing
    assert {name.removesuffix(" is missing") for name in absent} <= missing and len(absent) > 10

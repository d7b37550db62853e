"""Registries of variants: built-in names, entry points, and errors that name both registrations."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

import pytest

from accel_state.errors import ConfigurationError
from accel_state.registry import Registry, installed_entry_points


def publish(monkeypatch: pytest.MonkeyPatch, **targets: str) -> None:
    entries = [importlib.metadata.EntryPoint(name, target, "accel.parts") for name, target in targets.items()]
    monkeypatch.setattr(
        "accel_state.registry.installed_entry_points", lambda group: entries if group == "accel.parts" else []
    )


def make() -> Registry[object]:
    return Registry("part", {"path": "pathlib:Path", "join": "os:path.join"}, "accel.parts")


def test_an_entry_point_adds_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    publish(monkeypatch, counter="collections:Counter [fast]")
    registry = make()
    assert registry.names() == ["path", "join", "counter"] and "counter" in registry and 3 not in registry
    assert registry.target("counter") == "collections:Counter"
    assert registry.load("counter") is __import__("collections").Counter
    assert registry.load("join") is __import__("os").path.join


def test_two_targets_of_one_name_are_both_named_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    publish(monkeypatch, path="other.package:Path")
    registry = make()
    assert registry.load("path") is __import__("pathlib").Path
    for _ in range(2):
        with pytest.raises(ConfigurationError, match="'path'.*other.package"):
            registry.names()


def test_unknown_names_and_targets_without_the_class(monkeypatch: pytest.MonkeyPatch) -> None:
    publish(monkeypatch, missing="pathlib:Missing.deep")
    registry = make()
    with pytest.raises(ConfigurationError, match="'q'.*accel.parts"):
        registry.load("q")
    with pytest.raises(ConfigurationError, match="'missing'.*pathlib:Missing.deep"):
        registry.load("missing")


def test_metadata_is_read_once_for_all_groups(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    read = importlib.metadata.entry_points
    calls: list[object] = []

    def count(**given: Any) -> Any:
        calls.append(given)
        return read(**given)

    monkeypatch.setattr("importlib.metadata.entry_points", count)
    monkeypatch.syspath_prepend(tmp_path)
    for group in ("console_scripts", "accel.parts", "pytest11"):
        assert {entry.value for entry in installed_entry_points(group)} == {entry.value for entry in read(group=group)}
    assert calls == [{}]
    # What is found later on the path counts.
    info = tmp_path / "later" / "parts-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: parts\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[accel.parts]\ncounter = collections:Counter\n")
    monkeypatch.syspath_prepend(info.parent)
    assert make().load("counter") is __import__("collections").Counter

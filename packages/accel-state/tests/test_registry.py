"""Registries of variants: built-in names, entry points, and errors that name both registrations."""

from __future__ import annotations

import importlib.metadata

import pytest

from accel_state.errors import ConfigurationError
from accel_state.registry import Registry


def publish(monkeypatch: pytest.MonkeyPatch, **targets: str) -> None:
    entries = [importlib.metadata.EntryPoint(name, target, "accel.parts") for name, target in targets.items()]
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: entries if group == "accel.parts" else [])


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

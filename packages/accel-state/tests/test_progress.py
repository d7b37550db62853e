"""The progress bar is shown once a node."""

from __future__ import annotations

import io
import sys

import pytest

from accel_state.context import isolated
from accel_state.errors import ConfigurationError, MissingDependencyError
from accel_state.logging import tqdm
from accel_state.testing import run_world


def bars() -> list[tuple[list[int], bool]]:
    shown = []
    for options in ({}, {"main_process_only": False}, {"disable": True}):
        stream = io.StringIO()
        bar = tqdm(range(3), file=stream, **options)
        shown.append((list(bar), "3/3" in stream.getvalue()))
    return shown


def test_only_the_main_process_shows_a_bar():
    main, other = run_world(bars, 2)
    assert main == [([0, 1, 2], True), ([0, 1, 2], True), ([0, 1, 2], False)]
    assert other == [([0, 1, 2], False), ([0, 1, 2], True), ([0, 1, 2], False)]


def test_one_process():
    with isolated():
        assert bars()[0] == ([0, 1, 2], True)


def test_the_old_first_argument_is_refused():
    with pytest.raises(ConfigurationError, match="main_process_only as a keyword"):
        tqdm(True, range(3))


def test_without_tqdm_the_command_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    with pytest.raises(MissingDependencyError, match="pip install 'tqdm'"):
        tqdm(range(3))

"""A strategy that the launcher asks for is the one that trains, or the Accelerator says that it is not there."""

from __future__ import annotations

import pytest

from accel import Accelerator
from accel.setup.config_resolution import LAUNCHED, asked_strategies
from accel.setup.registry import PLUGINS, STRATEGIES
from accel_state.errors import ConfigurationError
from accel_state.options import ParadigmOptions, load_groups, resolve

SWITCHES = [opt for opt in ParadigmOptions.options() if LAUNCHED[opt.name] not in [*STRATEGIES, *PLUGINS]]


def test_every_switch_stands_for_a_strategy() -> None:
    assert set(LAUNCHED) == {opt.name for opt in ParadigmOptions.options()}


@pytest.mark.parametrize("opt", SWITCHES, ids=lambda opt: opt.name)
def test_a_strategy_that_is_not_installed_is_named(opt, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in resolve(load_groups(), {opt.name: "true"}, environ={}).environment().items():
        monkeypatch.setenv(name, text)
    with pytest.raises(
        ConfigurationError,
        match=f"{opt.env}=true requests the strategy {LAUNCHED[opt.name]}, .* Launch without --{opt.name}",
    ):
        Accelerator(cpu=True)


def test_switched_off_is_no_wish(monkeypatch: pytest.MonkeyPatch) -> None:
    for opt in ParadigmOptions.options():
        monkeypatch.setenv(str(opt.env), "false")
    assert Accelerator(cpu=True).num_processes == 1


def test_script_and_launcher_must_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    available = next(opt for opt in ParadigmOptions.options() if opt not in SWITCHES)
    name = LAUNCHED[available.name]
    assert asked_strategies([name]) == [name] and asked_strategies([]) == []
    monkeypatch.setenv(str(available.env), "true")
    assert asked_strategies([]) == asked_strategies([name]) == [name]
    with pytest.raises(ConfigurationError, match=f"settings for other, but was launched for {name}"):
        asked_strategies(["other"])

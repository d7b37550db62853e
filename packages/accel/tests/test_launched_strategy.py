"""A strategy that the launcher asks for is the one that trains, or the Accelerator says that it is not there."""

from __future__ import annotations

import pytest

from accel import Accelerator
from accel.fsdp.plugin import FullyShardedDataParallelPlugin
from accel.parallel.config import ParallelismConfig
from accel.setup.registry import FAMILIES, PLUGINS, STRATEGIES
from accel.setup.strategy_choice import choose
from accel_state.errors import ConfigurationError
from accel_state.options import ParadigmOptions, load_groups, resolve

LAUNCHED = {family.switch: name for name, family in FAMILIES.items() if family.switch}
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
    fsdp = FullyShardedDataParallelPlugin(fsdp_version=2)
    assert choose({}) == {} and choose({"fsdp": fsdp})["fsdp"] is fsdp
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    assert list(choose({})) == list(choose({"fsdp": fsdp})) == ["fsdp"]
    with pytest.raises(ConfigurationError, match="deepspeed.*fsdp"):
        choose({"deepspeed": object()})
    monkeypatch.setenv("ACCELERATE_FT", "true")
    assert choose({"fsdp": fsdp}) == {"fsdp": fsdp, "ft": None}


def test_families_that_do_not_combine_are_refused() -> None:
    mesh, fsdp = ParallelismConfig(dp_shard_size=1), FullyShardedDataParallelPlugin(fsdp_version=2)
    assert list(choose({"fsdp": fsdp, "mesh": mesh}).items()) == [("mesh", mesh), ("fsdp", fsdp)]
    with pytest.raises(ConfigurationError, match="fsdp.*deepspeed"):
        choose({"fsdp": fsdp, "deepspeed": object()})


def test_combinations_are_symmetric() -> None:
    for name, family in FAMILIES.items():
        assert all(name in FAMILIES[other].combines_with for other in family.combines_with)

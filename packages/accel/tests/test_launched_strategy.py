"""The strategy that trains is the one that the script or the launcher asks for, also where a package registers it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from accel import Accelerator
from accel.fsdp.plugin import FullyShardedDataParallelPlugin
from accel.parallel.config import ParallelismConfig, TorchTensorParallelPlugin
from accel.setup import config_resolution
from accel.setup.config_resolution import choose
from accel.setup.registry import STRATEGIES, TABLE
from accel_state import AcceleratorState, context
from accel_state.errors import ConfigurationError
from accel_state.options import ParadigmOptions, load_groups, resolve
from accel_state.registry import Registry

LAUNCHED = {row.switch: name for name, row in TABLE.items() if row.switch}
OPTIONS = [opt for opt in ParadigmOptions.options() if opt.is_flag]
SWITCHES = [opt for opt in OPTIONS if not TABLE[LAUNCHED[opt.name]].strategies and LAUNCHED[opt.name] not in STRATEGIES]


def test_every_switch_stands_for_a_strategy() -> None:
    assert set(LAUNCHED) == {opt.name for opt in OPTIONS}


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
    for opt in OPTIONS:
        monkeypatch.setenv(str(opt.env), "false")
    assert Accelerator(cpu=True).num_processes == 1


def test_script_and_launcher_must_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    fsdp = FullyShardedDataParallelPlugin(fsdp_version=2)
    assert choose(None, {}) == (None, {})
    assert choose(None, {"fsdp": fsdp}) == choose(fsdp, {}) == (None, {"fsdp": fsdp})
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    assert list(choose(None, {})[1]) == list(choose(None, {"fsdp": fsdp})[1]) == ["fsdp"]
    with pytest.raises(ConfigurationError, match="deepspeed.*fsdp"):
        choose(None, {"deepspeed": object()})
    monkeypatch.setenv("ACCELERATE_FT", "true")
    assert choose(None, {"fsdp": fsdp})[1] == {"fsdp": fsdp, "ft": None}


def test_settings_that_do_not_combine_are_refused() -> None:
    mesh, fsdp = ParallelismConfig(dp_shard_size=1), FullyShardedDataParallelPlugin(fsdp_version=2)
    assert list(choose(None, {"fsdp": fsdp, "mesh": mesh})[1].items()) == [("mesh", mesh), ("fsdp", fsdp)]
    with pytest.raises(ConfigurationError, match="fsdp.*deepspeed"):
        choose(None, {"fsdp": fsdp, "deepspeed": object()})


def test_settings_in_use_are_those_of_the_next_accelerator() -> None:
    tensor_parallel, mesh = TorchTensorParallelPlugin(tp_size=1), ParallelismConfig(dp_shard_size=1)
    AcceleratorState(cpu=True, torch_tp_plugin=tensor_parallel, parallelism_config=mesh)
    assert choose(None, {})[1] == {"mesh": mesh}
    AcceleratorState().fsdp_plugin = fsdp = FullyShardedDataParallelPlugin(fsdp_version=2)
    assert list(choose(None, {})[1].items()) == [("mesh", mesh), ("fsdp", fsdp)]


def test_combinations_are_symmetric() -> None:
    for name, row in TABLE.items():
        assert all(name in TABLE[other].compatible_with for other in row.compatible_with)


THEIRS = """
import os
from dataclasses import dataclass, field

from accel.contract.strategy import Strategy


@dataclass
class Weighed:
    factor: float = field(default_factory=lambda: float(os.environ.get("WEIGHED_FACTOR", 1)))
    strategy = "weighed"


class Megatron(Weighed):
    strategy = "megatron"


class WeighedStrategy(Strategy):
    def default_settings(self):
        return Weighed()

    def backward(self, loss, in_window, **kwargs):
        super().backward(loss * self.settings.factor, in_window, **kwargs)


class MegatronStrategy(WeighedStrategy):
    def default_settings(self):
        return Megatron()
"""

ENTRY_POINTS = "weighed = weighed_losses:WeighedStrategy\nmegatron = weighed_losses:MegatronStrategy\n"


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of a distribution that registers a strategy, as pip would install it."""
    (tmp_path / "weighed_losses.py").write_text(THEIRS)
    info = tmp_path / "weighed_losses-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: weighed-losses\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[accel.strategies]\n" + ENTRY_POINTS)
    monkeypatch.syspath_prepend(tmp_path)
    built_in = {name: target for row in TABLE.values() for name, target in row.strategies.items()}
    monkeypatch.setattr(config_resolution, "STRATEGIES", Registry("strategy", built_in, "accel.strategies"))
    import weighed_losses

    return weighed_losses


def trained(accelerator: Accelerator | None, factor: float = 1.0) -> torch.Tensor:
    """The weights after three steps; of plain PyTorch without an Accelerator."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * factor)
    if accelerator is not None:
        model, optimizer = accelerator.prepare(model, optimizer)
    for batch in torch.randn(3, 8, 4).unbind():
        loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
        loss.backward() if accelerator is None else accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return model.weight.detach()


def test_an_installed_strategy_is_chosen_like_those_of_accel(installed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = trained(None)
    with context.isolated():
        torch.testing.assert_close(trained(Accelerator(cpu=True, strategy="weighed")), plain)
    with context.isolated():  # its settings are those of later Accelerators too
        settings = installed.Weighed(0.5)
        accelerators = Accelerator(cpu=True, strategy=settings), Accelerator(cpu=True)
        assert [accelerator.strategy.settings for accelerator in accelerators] == [settings, settings]
        assert AcceleratorState().plugins == {"weighed": settings}
        torch.testing.assert_close(trained(accelerators[1]), trained(None, 0.5))
    monkeypatch.setenv("ACCELERATE_STRATEGY", "weighed")
    monkeypatch.setenv("WEIGHED_FACTOR", "0.25")
    with context.isolated():
        torch.testing.assert_close(trained(Accelerator(cpu=True)), trained(None, 0.25))
    assert not torch.allclose(trained(None, 0.25), plain)
    for strategy in (installed.Weighed(2.0), installed.WeighedStrategy(settings=installed.Weighed(2.0))):
        with context.isolated():  # the script's settings, for the strategy that the launcher names
            torch.testing.assert_close(trained(Accelerator(cpu=True, strategy=strategy)), trained(None, 2.0))


def test_an_installed_strategy_has_an_argument_and_a_switch_of_the_reference(
    installed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with context.isolated():
        settings = installed.Megatron(0.5)
        accelerator = Accelerator(cpu=True, megatron_lm_plugin=settings)
        assert accelerator.state.megatron_lm_plugin is settings
        torch.testing.assert_close(trained(accelerator), trained(None, 0.5))
    monkeypatch.setenv("ACCELERATE_USE_MEGATRON_LM", "true")
    monkeypatch.setenv("WEIGHED_FACTOR", "0.25")
    with context.isolated():
        accelerator = Accelerator(cpu=True)
        assert accelerator.state.megatron_lm_plugin.factor == 0.25
        torch.testing.assert_close(trained(accelerator), trained(None, 0.25))


@pytest.mark.parametrize("name", ["single", "weighed"])
def test_another_strategy_than_the_launched_one_is_refused(
    name: str, installed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_STRATEGY", name)
    other = "single" if name == "weighed" else installed.Weighed()
    with pytest.raises(ConfigurationError, match=f"was launched for the strategy {name}"):
        Accelerator(cpu=True, strategy=other)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ConfigurationError, match=f"with --use_fsdp or with --strategy {name}, not with both"):
        Accelerator(cpu=True)


def test_a_named_strategy_and_a_switch_must_agree(installed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    for strategy in ("ddp", "single", "deepspeed", "weighed", installed.WeighedStrategy()):
        with pytest.raises(ConfigurationError, match="but was launched for fsdp"):
            choose(strategy, {})
    assert choose("fsdp2", {}) == ("fsdp2", {})


def test_what_is_no_plugin_is_refused(installed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong in (installed.Weighed, object(), {"weighed": installed.Weighed()}, SimpleNamespace(strategy="ddp")):
        with pytest.raises(ConfigurationError, match="must be an accel.contract.strategy.Strategy object or one of"):
            Accelerator(cpu=True, strategy=wrong)
    with pytest.raises(ConfigurationError, match="megatron_lm_plugin=.* must be the plugin of the strategy 'megatron'"):
        Accelerator(cpu=True, megatron_lm_plugin=installed.Weighed())
    with pytest.raises(ConfigurationError, match="settings were given for fsdp, weighed"):
        choose(None, {"fsdp": FullyShardedDataParallelPlugin(fsdp_version=2), "weighed": installed.Weighed()})
    monkeypatch.setenv("ACCELERATE_STRATEGY", "wieghed")
    with pytest.raises(ConfigurationError, match="'wieghed' is not a known strategy. Did you mean 'weighed'?"):
        Accelerator(cpu=True)

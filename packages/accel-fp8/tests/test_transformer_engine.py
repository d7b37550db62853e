"""The adapter for Transformer Engine: replacing layers, recipes, autocast, and errors where it is not installed.

Transformer Engine itself needs a GPU, so these tests use a stand-in with its documented interface (te_interface/). They
check the calls, not the accuracy of its kernels.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accel_fp8 import (
    FP8Recipe,
    apply_fp8_autowrap,
    contextual_fp8_autocast,
    convert_model,
    create_backend,
    has_transformer_engine_layers,
)
from accel_fp8.backends import te as te_backend
from accel_state.errors import ConfigurationError, MissingDependencyError

INTERFACE = str(Path(__file__).with_name("te_interface"))


def _forget_modules() -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "transformer_engine"]:
        del sys.modules[name]


@pytest.fixture
def te(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    _forget_modules()
    monkeypatch.syspath_prepend(INTERFACE)
    import transformer_engine.pytorch as module

    module.calls.clear()
    yield module
    _forget_modules()


def network() -> nn.Module:
    torch.manual_seed(0)
    shared = nn.Linear(32, 32)
    return nn.ModuleDict(
        {
            "first": nn.Linear(16, 32),
            "norm": nn.LayerNorm(32, eps=1e-3),
            "inner": nn.Sequential(
                nn.Linear(32, 32, bias=False), nn.LayerNorm(32, elementwise_affine=False), nn.LayerNorm((4, 8))
            ),
            "shared": shared,
            "again": shared,
            "odd": nn.Linear(32, 10),
        }
    ).to(torch.bfloat16)


def test_layers_are_replaced_and_parameters_stay_the_same_objects(te: Any) -> None:
    model = network()
    parameters = dict(model.named_parameters())
    assert not has_transformer_engine_layers(model)
    convert_model(model)
    assert has_transformer_engine_layers(model)
    kinds = {name: type(module) for name, module in model.named_modules(remove_duplicate=False)}
    assert kinds["first"] is kinds["inner.0"] is kinds["shared"] is te.Linear and kinds["norm"] is te.LayerNorm
    assert kinds["odd"] is nn.Linear, "10 is not a multiple of 16"
    assert kinds["inner.1"] is kinds["inner.2"] is nn.LayerNorm, "without weights, and over two dimensions"
    assert model["shared"] is model["again"], "a layer in two places stays one layer"
    now = dict(model.named_parameters())
    assert list(now) == list(parameters) and all(now[name] is parameter for name, parameter in parameters.items())
    assert model["norm"].eps == 1e-3 and model["inner"][0].bias is None


def test_there_and_back_computes_the_same(te: Any) -> None:
    model = network()
    model["inner"].eval()
    parameters = dict(model.named_parameters())
    convert_model(model)
    convert_model(model, to_transformer_engine=False)
    kinds = {type(module) for module in model.modules()}
    assert te.Linear not in kinds and te.LayerNorm not in kinds
    now = dict(model.named_parameters())
    assert list(now) == list(parameters) and all(now[name] is parameter for name, parameter in parameters.items())
    assert not model["inner"][0].training and model["first"].training
    x = torch.randn(3, 16, dtype=torch.bfloat16)
    fresh = network()
    assert torch.equal(model["norm"](model["first"](x)), fresh["norm"](fresh["first"](x)))


@pytest.mark.parametrize(("linear", "norm"), [(True, False), (False, True)])
def test_only_one_kind_of_layer(te: Any, linear: bool, norm: bool) -> None:
    model = network()
    convert_model(model, _convert_linear=linear, _convert_ln=norm)
    assert (type(model["first"]) is te.Linear) is linear and (type(model["norm"]) is te.LayerNorm) is norm


def test_the_recipe_in_its_own_terms(te: Any) -> None:
    recipe = te_backend.build_recipe(
        FP8Recipe(margin=2, fp8_format="e4m3", amax_history_len=8, amax_compute_algo="max")
    )
    assert (recipe.margin, recipe.fp8_format.name, recipe.amax_history_len, recipe.amax_compute_algo) == (
        2,
        "E4M3",
        8,
        "max",
    )
    assert type(te_backend.build_recipe(FP8Recipe(use_mxfp8_block_scaling=True))).__name__ == "MXFP8BlockScaling"


@pytest.mark.parametrize("setting", [{"interval": 4}, {"override_linear_precision": (False, False, True)}])
def test_what_the_installed_version_dropped_is_refused(te: Any, setting: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="supported.*fp8_backend='native'"):
        te_backend.build_recipe(FP8Recipe(**setting))


def test_an_older_version_gets_them_and_has_no_block_scaling(te: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import transformer_engine.common.recipe as recipes

    given = {}

    class Older:
        def __init__(
            self, margin, interval, fp8_format, amax_history_len, amax_compute_algo, override_linear_precision
        ):
            given.update(interval=interval, override=override_linear_precision)

    monkeypatch.setattr(recipes, "DelayedScaling", Older)
    monkeypatch.delattr(recipes, "MXFP8BlockScaling")
    te_backend.build_recipe(FP8Recipe(interval=4, override_linear_precision=(True, False, True)))
    assert given == {"interval": 4, "override": (True, False, True)}
    with pytest.raises(ConfigurationError, match=r"needs Transformer Engine 2\.0"):
        te_backend.build_recipe(FP8Recipe(use_mxfp8_block_scaling=True))


@pytest.mark.parametrize("during_eval", [False, True])
def test_forward_runs_in_8_bits_while_it_trains(te: Any, during_eval: bool) -> None:
    model = nn.Linear(16, 16)
    forward = contextual_fp8_autocast(model.forward, "recipe", use_during_eval=during_eval)
    forward(torch.randn(2, 16))
    model.eval()
    forward(torch.randn(2, 16))
    assert [call["enabled"] for call in te.calls] == [True, during_eval]
    assert {call["recipe"] for call in te.calls} == {"recipe"}


def test_autowrap_converts_and_wraps(te: Any) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16))
    assert apply_fp8_autowrap(model, FP8Recipe(margin=1)) is model
    assert type(model[0]) is te.Linear
    model(torch.randn(2, 16))
    assert te.calls[0]["enabled"] and te.calls[0]["recipe"].margin == 1
    apply_fp8_autowrap(nn.Sequential(nn.Linear(16, 16)), None)


def test_a_newer_version_calls_its_autocast_otherwise(te: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    old = te.fp8_autocast
    monkeypatch.delattr(te, "fp8_autocast")
    monkeypatch.setattr(
        te,
        "autocast",
        lambda enabled, recipe, amax_reduction_group: old(enabled, recipe, amax_reduction_group),
        raising=False,
    )
    with te_backend.te_autocast(True, "recipe", "group"):
        pass
    assert te.calls == [{"enabled": True, "recipe": "recipe", "group": "group"}]


def test_what_it_says_of_the_machine_is_passed_on(te: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda")
    monkeypatch.setattr(te_backend, "is_transformer_engine_available", lambda: True)
    reason = te_backend.TransformerEngineBackend.unavailable(device)
    assert reason is not None and "compute capability 8.9" in reason
    monkeypatch.delattr(te, "is_fp8_available")
    monkeypatch.setattr(
        te, "fp8", type("fp8", (), {"check_fp8_support": staticmethod(lambda: (True, ""))}), raising=False
    )
    assert te_backend.TransformerEngineBackend.unavailable(device) is None
    assert te_backend.TransformerEngineBackend.merit(device) is not None


def test_the_back_end_converts_and_opens_its_block(te: Any) -> None:
    recipe = FP8Recipe(backend="te", margin=3)
    backend = te_backend.TransformerEngineBackend(recipe, torch.device("cuda"))
    model = backend.convert(nn.Sequential(nn.Linear(16, 16)), process_group="group")
    assert type(backend.convert(model)[0]) is te.Linear  # type: ignore[index]
    with backend.forward_context(training=False):
        pass
    assert te.calls[-1]["enabled"] is False and te.calls[-1]["recipe"].margin == 3
    with pytest.raises(ConfigurationError, match="'E5M2' cannot be trained with"):
        te_backend.TransformerEngineBackend(FP8Recipe(fp8_format="E5M2"), torch.device("cuda"))


@pytest.mark.skipif(te_backend.is_transformer_engine_available(), reason="Transformer Engine is installed")
def test_without_it_the_message_says_how_to_get_it() -> None:
    for call in (lambda: convert_model(network()), lambda: has_transformer_engine_layers(network())):
        with pytest.raises(MissingDependencyError, match=r"pip install 'accel-fp8\[te\]'"):
            call()
    with pytest.raises(ConfigurationError, match="'te'.*NVIDIA GPUs"):
        create_backend(FP8Recipe(backend="te"), torch.device("cpu"))
    assert te_backend.TransformerEngineBackend.unavailable(torch.device("cuda")) is None
    with pytest.raises(MissingDependencyError, match=r"pip install 'accel-fp8\[te\]'"):
        te_backend.TransformerEngineBackend(FP8Recipe(backend="te"), torch.device("cuda"))

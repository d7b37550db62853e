"""Selection of back ends, torchao's recipes, MS-AMP's interface, and conversion without an Accelerator."""

from __future__ import annotations

import logging
import sys
import types
from typing import Any

import pytest
import torch
from torch import nn

from accel_fp8 import (
    Backend,
    FP8Recipe,
    NativeLinear,
    autocast,
    choose_backend,
    convert,
    convert_model_to_fp8_ao,
    create_backend,
    has_ao_layers,
    has_native_layers,
    torchao_required,
)
from accel_fp8.backends import ao, msamp, native, te
from accel_fp8.backends.registry import BACKENDS
from accel_state.errors import ConfigurationError, MissingDependencyError
from accel_state.options.fp8 import BACKENDS as NAMES

CPU = torch.device("cpu")
GPU = torch.device("cuda")
with_torchao = pytest.mark.skipif(not ao.is_torchao_available(), reason="the extra ao is not installed")


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 16))


@pytest.mark.parametrize("name", NAMES)
def test_every_back_end_is_registered_under_the_name_of_its_file(name: str) -> None:
    backend = BACKENDS.load(name)
    assert issubclass(backend, Backend) and backend.name == name and backend.__module__ == f"accel_fp8.backends.{name}"


def test_on_a_cpu_the_native_one_is_taken_and_the_log_says_why(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="accel_fp8"):
        model = convert(network())
    assert "FP8 back end native: torch cannot multiply in 8 bits on cpu" in caplog.text
    assert has_native_layers(model)
    assert choose_backend("native", CPU).reason == "selected by name"


@pytest.mark.parametrize(
    ("has_te", "has_ao", "in_8_bits", "expected"),
    [
        (True, True, True, "te"),
        (False, True, True, "ao"),
        (False, False, True, "native"),
        (False, True, False, "native"),
    ],
)
def test_on_a_gpu_the_best_of_what_is_installed_is_taken(
    monkeypatch: pytest.MonkeyPatch, has_te: bool, has_ao: bool, in_8_bits: bool, expected: str
) -> None:
    monkeypatch.setattr(te, "is_transformer_engine_available", lambda: has_te)
    monkeypatch.setattr(te, "_why_without_fp8", lambda: None)
    monkeypatch.setattr(ao, "is_torchao_available", lambda: has_ao)
    for module in (ao, native):
        monkeypatch.setattr(module, "computes_in_8_bits", lambda device: in_8_bits)
    choice = choose_backend(None, GPU)
    assert choice.name == expected and choice.reason
    if not in_8_bits:
        assert "without its speed" in choice.reason


def test_a_gpu_that_transformer_engine_refuses_gets_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(te, "is_transformer_engine_available", lambda: True)
    monkeypatch.setattr(te, "_why_without_fp8", lambda: "too old")
    monkeypatch.setattr(native, "computes_in_8_bits", lambda device: False)
    monkeypatch.setattr(ao, "computes_in_8_bits", lambda device: False)
    assert choose_backend(None, GPU).name == "native"
    with pytest.raises(ConfigurationError, match="'te'.*old.*--fp8_backend"):
        choose_backend("te", GPU)


def test_an_unknown_back_end() -> None:
    with pytest.raises(ConfigurationError, match="'nvfp4'.*FP8"):
        choose_backend("nvfp4", CPU)


@with_torchao
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_torchao_trains_by_each_of_its_recipes(recipe: str) -> None:
    model = network()
    parameters = dict(model.named_parameters())
    convert(model, FP8Recipe(backend="ao", ao_recipe=recipe))
    assert [type(layer).__name__ for layer in model if hasattr(layer, "weight")] == ["Linear", "Float8Linear", "Linear"]
    now = dict(model.named_parameters())
    assert all(now[name] is parameter for name, parameter in parameters.items())
    with autocast(model):
        loss = model(torch.randn(10, 32)).float().pow(2).mean()
    loss.backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


@with_torchao
def test_torchao_takes_its_own_settings_and_filters() -> None:
    from torchao.float8 import Float8LinearConfig

    config = Float8LinearConfig(emulate=True)
    model = convert(
        network(), FP8Recipe(backend="ao", config=config, module_filter_func=lambda layer, name: name == "0")
    )
    assert [name for name, layer in model.named_modules() if type(layer).__name__ == "Float8Linear"] == ["0"]
    assert model[0].config.emulate  # type: ignore[index]
    plain = convert_model_to_fp8_ao(network())
    assert has_ao_layers(plain) and not has_ao_layers(network())
    assert not has_ao_layers(convert_model_to_fp8_ao(nn.Linear(32, 32)))
    assert not plain[2].config.enable_fsdp_float8_all_gather  # type: ignore[index]


@with_torchao
def test_torchao_gathers_in_8_bits_only_what_is_sharded() -> None:
    for recipe, sharded, expected in (
        ("tensorwise", True, True),
        ("tensorwise", False, False),
        ("rowwise", True, False),
    ):
        model = convert(network(), FP8Recipe(backend="ao", ao_recipe=recipe), sharded=sharded)
        assert model[2].config.enable_fsdp_float8_all_gather is expected  # type: ignore[index]


def test_without_torchao_the_message_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ao, "is_torchao_available", lambda: False)
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.setitem(sys.modules, "torchao.float8", None)

    @torchao_required
    def mine() -> int:
        return 1

    for call in (mine, lambda: convert_model_to_fp8_ao(network()), lambda: has_ao_layers(network())):
        with pytest.raises(MissingDependencyError, match=r"pip install 'accel-fp8\[ao\]'"):
            call()
    with pytest.raises(MissingDependencyError, match=r"pip install 'accel-fp8\[ao\]'"):
        create_backend(FP8Recipe(backend="ao"), CPU)
    monkeypatch.setattr(ao, "is_torchao_available", lambda: True)
    assert mine() == 1


def test_msamp_is_called_as_documented(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}

    def initialize(model: Any, optimizer: Any, opt_level: str) -> tuple[Any, Any]:
        given.update(model=model, optimizer=optimizer, opt_level=opt_level)
        return "new model", "new optimizer"

    # MS-AMP is on no package index: what is tested is that its documented function gets what it documents.
    module = types.ModuleType("msamp")
    module.initialize = initialize  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "msamp", module)
    monkeypatch.setattr(msamp, "is_msamp_available", lambda: True)
    backend, choice = create_backend(FP8Recipe(backend="msamp", opt_level="O1"), GPU)
    assert choice.name == "msamp" and backend.takes_optimizer
    assert backend.initialize("model", "optimizer") == ("new model", "new optimizer")  # type: ignore[arg-type]
    assert given == {"model": "model", "optimizer": "optimizer", "opt_level": "O1"}
    with pytest.raises(ConfigurationError, match="together with its optimizer"):
        convert(network(), FP8Recipe(backend="msamp"), device="cuda")


def test_msamp_is_refused_where_it_cannot_be() -> None:
    with pytest.raises(ConfigurationError, match="MS-AMP computes on a GPU only"):
        create_backend(FP8Recipe(backend="msamp"), CPU)
    with pytest.raises(MissingDependencyError, match=r"no longer maintained.*'ao'.*'native'"):
        create_backend(FP8Recipe(backend="msamp"), GPU)


def test_a_back_end_that_changes_nothing() -> None:
    backend = Backend(FP8Recipe(), CPU)
    model, optimizer = network(), object()
    assert backend.convert(model) is model and backend.initialize(model, optimizer) == (model, optimizer)
    assert not backend.takes_optimizer and Backend.unavailable(CPU) is None and Backend.merit(CPU) is None
    backend.synchronize(model)
    with backend.autocast(), backend.forward_context(training=True):
        assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype is torch.bfloat16
    with backend.autocast(enabled=False):
        assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype is torch.float32
    with Backend(FP8Recipe(), torch.device("cuda")).autocast():  # no such device here, so nothing is cast
        assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype is torch.float32


def test_the_autocast_of_a_model_and_of_wrappers_around_it() -> None:
    model = convert(network(), FP8Recipe(backend="native"))
    wrapper = nn.Sequential(model)
    with autocast(wrapper):
        assert wrapper(torch.randn(4, 32)).dtype is torch.bfloat16
    with autocast(model, enabled=False):
        assert model(torch.randn(4, 32)).dtype is torch.float32
    assert isinstance(model[2], NativeLinear)  # type: ignore[index]
    with pytest.raises(ConfigurationError, match=r"not converted. Call accel_fp8\.convert"), autocast(network()):
        pass

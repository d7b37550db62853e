"""mixed_precision="fp8" of the Accelerator: recipes, back ends, evaluation, several processes, checkpoints."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel import Accelerator, AutocastKwargs, KwargsHandler
from accel.kwargs.fp8 import FP8Kwargs
from accel.utils import AORecipeKwargs, FP8RecipeKwargs, MSAMPRecipeKwargs, NativeRecipeKwargs, TERecipeKwargs
from accel_fp8 import choose_backend
from accel_state import AcceleratorState, ConfigurationError, PartialState, is_torch_version
from accel_state.env import patch_environment
from accel_state.imports import is_torchao_available
from accel_state.testing import run_world

with_torchao = pytest.mark.skipif(not is_torchao_available(), reason="torchao is not installed")


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(32, 64),
        nn.ReLU(),
        nn.Linear(64, 64),
        nn.LayerNorm(64),
        nn.Linear(64, 64),
        nn.ReLU(),
        nn.Linear(64, 16),
    )


def accelerator(*handlers: KwargsHandler, **arguments: Any) -> Accelerator:
    return Accelerator(mixed_precision="fp8", cpu=True, kwargs_handlers=list(handlers), **arguments)


def layers(model: nn.Module) -> list[str]:
    return [type(module).__name__ for module in model.modules() if isinstance(module, nn.Linear)]


def train(runner: Accelerator, model: nn.Module, optimizer: Any, first: int = 0, last: int = 4) -> list[float]:
    losses = []
    for step in range(first, last):
        generator = torch.Generator().manual_seed(100 * step + runner.process_index)
        loss = model(torch.randn(8, 32, generator=generator)).pow(2).mean()
        runner.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.fixture(autouse=True)
def _state() -> Any:
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize(
    ("handler", "name", "kind"),
    [
        (None, "native", "NativeLinear"),
        (FP8RecipeKwargs(backend="NATIVE", margin=1), "native", "NativeLinear"),
        (NativeRecipeKwargs(scaling="rowwise"), "native", "NativeLinear"),
        pytest.param(AORecipeKwargs(), "ao", "Float8Linear", marks=with_torchao),
    ],
    ids=str,
)
def test_a_model_trains_in_8_bits(handler: Any, name: str, kind: str) -> None:
    runner = accelerator(*([handler] if handler else []))
    model = network()
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    prepared, optimizer = runner.prepare(model, optimizer)
    assert (
        runner.fp8_backend == name and runner.mixed_precision == "fp8" and runner.native_amp and runner.scaler is None
    )
    assert layers(prepared) == ["Linear", kind, kind, "Linear"]
    assert all(new is old for new, old in zip(prepared.parameters(), parameters, strict=True))
    assert prepared(torch.randn(4, 32)).dtype is torch.float32
    losses = train(runner, prepared, optimizer, last=8)
    assert losses[-1] < losses[0] / 2


def test_the_numbers_are_close_to_those_of_bfloat16() -> None:
    losses = {}
    for precision in ("bf16", "fp8"):
        runner = Accelerator(mixed_precision=precision, cpu=True)
        model, optimizer = runner.prepare(network(), torch.optim.SGD(network().parameters()))
        model = network()
        model, optimizer = runner.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
        losses[precision] = train(runner, model, optimizer, last=6)
        runner.end_training()
    assert losses["fp8"] == pytest.approx(losses["bf16"], rel=0.05) and losses["fp8"] != losses["bf16"]


@pytest.mark.skipif(is_torch_version("<", "2.7"), reason="torch 2.6 multiplies 8-bit matrices on GPUs only")
def test_the_log_says_which_back_end_and_why(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="accel.precision.fp8"):
        accelerator()
    reason = choose_backend(None, torch.device("cpu")).reason  # some processors are too slow for it
    assert f"FP8 backend native: {reason}" in caplog.text and "in 8 bits on cpu" in reason


def test_the_launchers_settings_reach_the_layers() -> None:
    with patch_environment(
        ACCELERATE_MIXED_PRECISION="fp8",
        ACCELERATE_FP8_BACKEND="native",
        ACCELERATE_FP8_AMAX_HISTORY_LEN="7",
        ACCELERATE_FP8_FORMAT="E4M3",
    ):
        runner = Accelerator(cpu=True, kwargs_handlers=[NativeRecipeKwargs(fp8_format="HYBRID")])
        model = runner.prepare(network())
    assert model[2].recipe.amax_history_len == 7 and model[2].recipe.fp8_format == "HYBRID", "the script wins"
    assert model[2].fp8_amax_history.shape == (3, 7)


def test_a_handler_left_empty_has_the_launchers_values() -> None:
    assert MSAMPRecipeKwargs().opt_level == "O2" and MSAMPRecipeKwargs().to_kwargs() == {}
    with patch_environment(
        ACCELERATE_FP8_OPT_LEVEL="O1", ACCELERATE_FP8_MARGIN="2", ACCELERATE_FP8_PAD_INNER_DIM="false"
    ):
        assert MSAMPRecipeKwargs().opt_level == "O1"
        assert TERecipeKwargs(interval=3) == TERecipeKwargs(margin=2, interval=3)
        assert AORecipeKwargs().pad_inner_dim is False
    assert TERecipeKwargs(margin=2).to_kwargs() == {"margin": 2}
    assert FP8RecipeKwargs(optimization_level="O1").opt_level == "O1"
    assert FP8RecipeKwargs(override_linear_precision=True).override_linear_precision == (True, True, True)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "settings", [{"backend": "x"}, {"fp8_format": "E9"}, {"margin": -1}, {"amax_history_len": 0}, {"opt_level": "O3"}]
)
def test_a_bad_value_in_a_handler_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(settings))):
        FP8RecipeKwargs(**settings)


def test_both_names_of_the_optimization_level() -> None:
    with pytest.raises(ConfigurationError, match="opt_level='O1'.*optimization_level='O2'"):
        FP8RecipeKwargs(opt_level="O1", optimization_level="O2")


def test_recipes_without_effect_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    Accelerator(mixed_precision="bf16", cpu=True, kwargs_handlers=[TERecipeKwargs()])
    assert "holds TERecipeKwargs, which has no effect with mixed_precision='bf16'" in caplog.text
    AcceleratorState._reset_state(reset_partial_state=True)
    with pytest.raises(ConfigurationError, match="AORecipeKwargs.*NativeRecipeKwargs."):
        accelerator(AORecipeKwargs(), NativeRecipeKwargs())


@pytest.mark.parametrize(
    ("handler", "error", "message"),
    [
        (TERecipeKwargs(), ConfigurationError, "NVIDIA GPUs only"),
        (MSAMPRecipeKwargs(), ConfigurationError, "on a GPU only"),
        (NativeRecipeKwargs(fp8_format="E5M2"), ConfigurationError, "'E5M2' cannot be trained with"),
    ],
    ids=str,
)
def test_a_back_end_that_cannot_compute_here(handler: FP8Kwargs, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        accelerator(handler)


def test_a_device_without_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    device = PartialState(cpu=True).device_backend
    monkeypatch.setattr(type(device), "supports_autocast", lambda self, dtype: False)
    with pytest.raises(ConfigurationError, match="mixed_precision='fp8'"):
        accelerator()


def test_evaluation_and_autocast_settings() -> None:
    runner = accelerator(AutocastKwargs(outputs_to_fp32=False), NativeRecipeKwargs(use_autocast_during_eval=True))
    x = torch.randn(4, 32, device=runner.device)
    model = runner.prepare(network())
    assert model(x).dtype is torch.bfloat16
    in_8_bits = model.eval()(x)
    runner.end_training()
    other = accelerator(AutocastKwargs(outputs_to_fp32=False)).prepare(network()).eval()
    assert not torch.equal(other(x), in_8_bits)
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        assert torch.equal(other(x), network().to(x.device)(x)), "by default it is bfloat16 in evaluation mode"
    assert torch.mm(x, x.t()).dtype is torch.float32
    with runner.autocast():
        assert torch.mm(x, x.t()).dtype is torch.bfloat16


def test_prepared_twice_copied_and_unwrapped() -> None:
    runner = accelerator()
    model = runner.prepare(network())
    assert runner.prepare(model) is model
    twin = copy.deepcopy(model)
    twin(torch.randn(4, 32)).sum().backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    plain = runner.unwrap_model(model, keep_fp32_wrapper=False)
    assert plain is model and "forward" not in model.__dict__ and "NativeLinear" in layers(plain)


def test_compiled_models_have_one_graph() -> None:
    torch._dynamo.reset()
    runner = accelerator(dynamo_backend="aot_eager")
    model = network()
    prepared, optimizer = runner.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    torch._dynamo.utils.counters.clear()
    losses = train(runner, prepared, optimizer)
    assert losses[-1] < losses[0] and not torch._dynamo.utils.counters["graph_break"]
    torch._dynamo.reset()


def test_a_model_that_was_compiled_before_prepare_computes_the_same() -> None:
    torch._dynamo.reset()
    results = []
    for compiles in (False, True):
        AcceleratorState._reset_state(reset_partial_state=True)
        runner = accelerator()
        model = network()
        whole: Any = torch.compile(model, backend="eager") if compiles else model
        prepared, optimizer = runner.prepare(whole, torch.optim.AdamW(model.parameters(), lr=1e-2))
        losses = train(runner, prepared, optimizer)
        prepared.eval()
        results.append([*losses, prepared(torch.ones(4, 32)).tolist()])
    assert results[0] == results[1]
    torch._dynamo.reset()


@pytest.mark.parametrize(
    "handler", [NativeRecipeKwargs(amax_history_len=8), pytest.param(AORecipeKwargs(), marks=with_torchao)], ids=str
)
def test_a_checkpoint_resumes_bit_for_bit(tmp_path: Path, handler: FP8Kwargs) -> None:
    def start() -> tuple[Accelerator, nn.Module, Any]:
        AcceleratorState._reset_state(reset_partial_state=True)
        runner = accelerator(handler)
        model = network()
        return (runner, *runner.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2)))

    runner, model, optimizer = start()
    train(runner, model, optimizer, 0, 3)
    runner.save_state(str(tmp_path / "state"))
    expected = train(runner, model, optimizer, 3, 6)
    state = copy.deepcopy(model.state_dict())
    runner, model, optimizer = start()
    runner.load_state(str(tmp_path / "state"))
    assert train(runner, model, optimizer, 3, 6) == expected
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in state.items())


def two_processes(folder: str) -> dict[str, Any]:
    def start() -> tuple[Accelerator, nn.Module, Any]:
        AcceleratorState._reset_state()
        runner = accelerator(NativeRecipeKwargs(amax_history_len=4))
        model = network()
        return (runner, *runner.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2)))

    runner, model, optimizer = start()
    train(runner, model, optimizer, 0, 3)
    state = model.state_dict()
    same = {name: runner.gather(tensor.float().reshape(1, -1)) for name, tensor in state.items()}
    runner.save_state(f"{folder}/state")
    expected = train(runner, model, optimizer, 3, 6)
    try:
        with runner.join_uneven_inputs([model]):
            pass
        refused = ""
    except ConfigurationError as error:
        refused = str(error)
    again, model, optimizer = start()
    again.load_state(f"{folder}/state")
    return {
        "different": [name for name, both in same.items() if not torch.equal(both[0], both[1])],
        "resumed": train(again, model, optimizer, 3, 6) == expected,
        "refused": refused,
    }


def test_two_processes_agree_on_everything_and_resume(tmp_path: Path) -> None:
    for result in run_world(two_processes, 2, str(tmp_path)):
        assert result["different"] == [], "the largest values of the step that is under way too"
        assert result["resumed"]
        assert "NativeRecipeKwargs(scaling='dynamic')" in result["refused"]


def test_accumulated_gradients_and_data_loaders() -> None:
    runner = accelerator(NativeRecipeKwargs(amax_history_len=16), gradient_accumulation_steps=2)
    model = network()
    loader = DataLoader(TensorDataset(torch.randn(32, 32)), batch_size=4)
    model, optimizer, loader = runner.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    steps = 0
    for (x,) in loader:
        with runner.accumulate(model):
            before = model[2].weight.detach().clone()
            runner.backward(model(x).pow(2).mean())
            optimizer.step()
            optimizer.zero_grad()
            steps += not torch.equal(before, model[2].weight)
    assert steps == 4 and model[2].fp8_updates == 8


class TogetherEngine:
    """A back end that, as MS-AMP does, prepares a model together with its optimizer."""

    takes_optimizer = True

    def convert(self, model: nn.Module) -> nn.Module:
        return model

    def initialize(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, Any]:
        return model, torch.optim.SGD(model.parameters(), lr=0.25)


def test_a_model_and_its_optimizer_are_prepared_together_where_the_back_end_asks_for_it() -> None:
    runner = accelerator()
    runner.precision.engine = TogetherEngine()  # type: ignore[attr-defined]
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    wrapped, prepared, schedule = runner.prepare(model, optimizer, scheduler)
    assert runner.prepare(wrapped, prepared) == (wrapped, prepared)  # not together again
    assert prepared.optimizer is not optimizer and runner.prepare(wrapped) is wrapped
    assert prepared.optimizer.param_groups[0]["lr"] == 0.25
    assert schedule.scheduler.optimizer is prepared.optimizer
    for objects in ((network(),), (network(), network(), torch.optim.SGD(model.parameters(), lr=0.1))):
        with pytest.raises(ConfigurationError, match="together with its optimizer"):
            runner.prepare(*objects)
    loader = DataLoader(TensorDataset(torch.randn(4, 32)))
    assert runner.prepare(loader) is not None

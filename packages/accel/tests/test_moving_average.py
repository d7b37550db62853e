"""Moving averages of weights under each strategy, against torch's AveragedModel in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from expert_runs import build as mixture
from language_models import BATCH, build, dataset, loss_of, stack
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, get_swa_multi_avg_fn
from windows import assert_weights, copied

from accel import Accelerator, LocalSGD
from accel.contract.strategy import Strategy
from accel.fsdp.plugin import FullyShardedDataParallelPlugin
from accel.parallel.config import ParallelismConfig
from accel.training.moving_average import MovingAverage
from accel.utils import NativeRecipeKwargs
from accel_checkpoint.names import CheckpointError
from accel_fp8 import FP8Recipe, convert
from accel_fp8.linear import NativeLinear
from accel_state import context
from accel_state.errors import ConfigurationError
from accel_state.testing import run_world

pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.skipif(find_spec("transformers") is None, reason="the models are those of transformers"),
]
BLOCKS = {"auto_wrap_policy": "transformer_based_wrap"}
# Plugin and mesh; no plugin and no mesh is one process, or DDP.
TWO: dict[str, tuple[dict[str, Any] | None, dict[str, int]]] = {
    "DDP": (None, {}),
    "FSDP 1": ({"fsdp_version": 1, **BLOCKS}, {}),
    "FSDP 1, whole files": ({"fsdp_version": 1, "state_dict_type": "FULL_STATE_DICT", **BLOCKS}, {}),
    "FSDP 1, not sharded": ({"fsdp_version": 1, "reshard_after_forward": "NO_SHARD"}, {}),
    "FSDP 1, merged": ({"fsdp_version": 1, "use_orig_params": False, **BLOCKS}, {}),
    "FSDP 2": ({"fsdp_version": 2, **BLOCKS}, {}),
    "FSDP 2, one unit": ({"fsdp_version": 2, "reshard_after_forward": False}, {}),
    "FSDP 2, whole files": ({"fsdp_version": 2, "state_dict_type": "FULL_STATE_DICT", **BLOCKS}, {}),
    "tp": (None, {"tp_size": 2}),
    "pp": (None, {"pp_size": 2}),
    "pp, whole files": ({"fsdp_version": 2, "state_dict_type": "FULL_STATE_DICT"}, {"pp_size": 2}),
    "ep": ({"fsdp_version": 2, **BLOCKS}, {"dp_shard_size": 2, "ep_size": 2}),
    "ep, tp": (None, {"tp_size": 2, "ep_size": 2}),
}
FOUR: dict[str, tuple[dict[str, Any] | None, dict[str, int]]] = {
    "HSDP": ({"fsdp_version": 2, **BLOCKS}, {"dp_replicate_size": 2, "dp_shard_size": 2}),
    "dp_shard x tp": ({"fsdp_version": 2, **BLOCKS}, {"dp_shard_size": 2, "tp_size": 2}),
    "pp x dp_shard": ({"fsdp_version": 2, **BLOCKS}, {"pp_size": 2, "dp_shard_size": 2}),
    "pp x dp_shard, whole files": (
        {"fsdp_version": 2, "state_dict_type": "FULL_STATE_DICT", **BLOCKS},
        {"pp_size": 2, "dp_shard_size": 2},
    ),
    "pp x tp": (None, {"pp_size": 2, "tp_size": 2}),
    "ep x dp_shard": ({"fsdp_version": 2, **BLOCKS}, {"dp_shard_size": 4, "ep_size": 2}),
    "ep x pp": ({"fsdp_version": 2, **BLOCKS}, {"pp_size": 2, "dp_shard_size": 2, "ep_size": 2}),
}
DECAY, STEPS, WINDOW = 0.7, 4, 2
SAMPLES = dataset(STEPS * WINDOW)
BATCHES = [stack(SAMPLES[start : start + BATCH]) for start in range(0, len(SAMPLES), BATCH)]


def model_and_optimizer(kind: str = "frozen") -> tuple[Any, Any]:
    """A model of a :func:`kind_of` case, and an optimizer that leaves rounding as it is."""
    if kind == "experts":
        model: Any = mixture("deepseek")
        return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model = build("gpt2")
    model.transformer.wpe.weight.requires_grad_(kind != "frozen")
    return model, torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)


def expected(kind: str, steps: int = STEPS) -> dict[str, Any]:
    model, optimizer = model_and_optimizer(kind)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    for step in range(steps):
        for batch in BATCHES[step * WINDOW : (step + 1) * WINDOW]:
            (loss_of(model, batch) / WINDOW).backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
    loss = loss_of(average.module, BATCHES[0]).item()
    return {"average": average.module.state_dict(), "weights": model.state_dict(), "loss": loss}


def accelerator_of(settings: dict[str, Any] | None, mesh: dict[str, int], **more: Any) -> Accelerator:
    plugin = None if settings is None else FullyShardedDataParallelPlugin(**settings)
    sizes = ParallelismConfig(**mesh) if mesh else None
    return Accelerator(cpu=True, fsdp_plugin=plugin, parallelism_config=sizes, **more)


def kind_of(name: str) -> str:
    """A mixture of experts, or a model with fused and tied weights, some of them frozen if they can be."""
    return "experts" if name.startswith("ep") else "trained" if "merged" in name else "frozen"


class Run:
    def __init__(self, settings: dict[str, Any] | None, mesh: dict[str, int], kind: str, folder: str = "") -> None:
        self.accelerator = accelerator_of(settings, mesh, gradient_accumulation_steps=WINDOW)
        model, optimizer = model_and_optimizer(kind)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        self.average = self.accelerator.moving_average(self.model, DECAY)
        if folder:
            self.accelerator.load_state(folder)

    def train(self, begin: int, end: int) -> None:
        for micro, batch in enumerate(BATCHES[begin * WINDOW : end * WINDOW]):
            with self.accelerator.accumulate(self.model):
                self.accelerator.backward(loss_of(self.model, batch))
                self.optimizer.step()
                stepped = self.average.update()
                assert stepped == ((micro + 1) % WINDOW == 0) and not self.average.update()
                self.optimizer.zero_grad()
            if begin == 0 and micro in (2, 3):  # in an open window, and after it
                with self.average.applied(), torch.no_grad():
                    loss_of(self.model, batch)

    def found(self) -> dict[str, Any]:
        with torch.no_grad():
            loss_of(self.model, BATCHES[0])  # leaves the weights gathered
        with self.average.applied():
            loss = loss_of(self.model, BATCHES[0]).item()
            average = self.accelerator.get_state_dict(self.model)
        weights = copied(self.accelerator.get_state_dict(self.model))
        return {"average": average, "weights": weights, "loss": loss}


def train_all(cases: dict[str, Any], folder: str) -> dict[str, Any]:
    found = {}
    for name, (settings, mesh) in cases.items():
        kind = kind_of(name)
        with context.isolated():
            run = Run(settings, mesh, kind)
            run.train(0, 2)
            run.accelerator.save_state(f"{folder}/{name}")
            run.train(2, STEPS)
            found[name] = run.found()
        with context.isolated():  # on the same ranks
            run = Run(settings, mesh, kind, f"{folder}/{name}")
            run.train(2, STEPS)
            found[f"{name}, resumed"] = run.found()
    return found


def resume_all(cases: dict[str, Any], folder: str) -> dict[str, Any]:
    found = {}
    for name in cases:
        with context.isolated():
            run = Run(*cases[name], kind_of(name), f"{folder}/{name}")
            run.train(2, STEPS)
            found[name] = run.found()
    return found


def check(found: dict[str, Any], cases: set[str]) -> None:
    plains = {kind: expected(kind) for kind in set(map(kind_of, found))}
    assert set(found) == cases
    for name, result in found.items():
        plain = plains[kind_of(name)]
        assert_weights(result["average"], plain["average"], name, 1e-6)
        assert_weights(result["weights"], plain["weights"], name, 1e-6)
        assert result["loss"] == pytest.approx(plain["loss"], abs=1e-6), name


def with_resumed(cases: dict[str, Any]) -> set[str]:
    return {*cases, *(f"{name}, resumed" for name in cases)}


def test_averages_equal_those_of_one_process(tmp_path: Path) -> None:
    check(run_world(train_all, 2, TWO, str(tmp_path), timeout=390)[0], with_resumed(TWO))
    one = {name: (None, {}) for name in TWO}
    check(run_world(resume_all, 1, one, str(tmp_path), timeout=200)[0], set(one))


def test_averages_of_one_process_are_loaded_on_two(tmp_path: Path) -> None:
    name = "FSDP 2"
    check(run_world(train_all, 1, {name: (None, {})}, str(tmp_path))[0], with_resumed({name: None}))
    for other in ("FSDP 1", "FSDP 2", "tp"):
        check(run_world(resume_all, 2, {name: TWO[other]}, str(tmp_path), timeout=200)[0], {name})


@pytest.mark.slow
def test_averages_on_meshes_of_two_axes(tmp_path: Path) -> None:
    check(run_world(train_all, 4, FOUR, str(tmp_path), timeout=390)[0], with_resumed(FOUR))


DYNAMIC = NativeRecipeKwargs(scaling="dynamic")
# Settings of the Accelerator, plugin, mesh, and whether the weights are in bf16.
OTHERS: dict[str, tuple[dict[str, Any], dict[str, Any] | None, dict[str, int], bool]] = {
    "DDP in bf16": ({"mixed_precision": "bf16"}, None, {}, False),
    "FSDP 1 in bf16": ({"mixed_precision": "bf16"}, {"fsdp_version": 1, **BLOCKS}, {}, False),
    "FSDP 2 in bf16": ({"mixed_precision": "bf16"}, {"fsdp_version": 2, **BLOCKS}, {}, False),
    "FSDP 1 in fp16": ({"mixed_precision": "fp16"}, {"fsdp_version": 1, **BLOCKS}, {}, False),
    "FSDP 2 in fp16": ({"mixed_precision": "fp16"}, {"fsdp_version": 2, **BLOCKS}, {}, False),
    **{
        f"{name} in fp8": ({"mixed_precision": "fp8", "kwargs_handlers": [DYNAMIC]}, settings, {}, False)
        for name, settings in (
            ("DDP", None),
            ("FSDP 1", {"fsdp_version": 1, **BLOCKS}),
            ("FSDP 2", {"fsdp_version": 2, **BLOCKS}),
        )
    },
    "FSDP 2, offloaded": ({}, {"fsdp_version": 2, "cpu_offload": True, **BLOCKS}, {}, False),
    "FSDP 1, offloaded": ({}, {"fsdp_version": 1, "cpu_offload": True, **BLOCKS}, {}, False),
    "FSDP 2, bf16 weights": ({}, {"fsdp_version": 2, **BLOCKS}, {}, True),
    "FSDP 2, thawed": ({}, {"fsdp_version": 2, **BLOCKS}, {}, False),
    "cp": ({}, {"fsdp_version": 2, **BLOCKS}, {"cp_size": 2}, False),
    "sp": ({}, {"fsdp_version": 2, **BLOCKS}, {"sp_size": 2}, False),
    "compiled": ({"dynamo_backend": "eager"}, {"fsdp_version": 2, **BLOCKS}, {}, False),
}


def loss_on(accelerator: Accelerator, model: Any, number: int, trains: bool = False) -> float:
    """The loss of a batch, of which each rank has its part where sequences are split."""
    [batch] = accelerator.deepspeed_ulysses_dl_adapter([copied(BATCHES[number])], model)
    parts = list(batch.values())
    with torch.set_grad_enabled(trains), accelerator.maybe_context_parallel(parts, [1, 1], set(parts)):
        loss = loss_of(model, batch)
        if trains:
            accelerator.backward(loss)
    return loss.item()


def follow(cases: dict[str, Any]) -> dict[str, Any]:
    """Averages, and those of the gathered weights; with losses in the block and after `copy_to_model`."""
    found = {}
    for name, (arguments, settings, mesh, half) in cases.items():
        with context.isolated():
            accelerator = accelerator_of(settings, mesh, **arguments)
            model = build("llama", tied=True)
            model = model.bfloat16() if half else model
            model.model.layers[1].requires_grad_("thawed" not in name)
            optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.2)
            model, optimizer = accelerator.prepare(model, optimizer)
            average, expected = accelerator.moving_average(model, DECAY), {}
            for step in range(4):
                if step == 2:
                    accelerator.unwrap_model(model).model.layers[1].requires_grad_(True)
                loss_on(accelerator, model, step, trains=True)
                optimizer.step()
                average.update()
                optimizer.zero_grad()
                for key, value in accelerator.get_state_dict(model).items():
                    value = value.float()
                    expected[key] = value.clone() if step == 0 else expected[key].lerp(value, 1 - DECAY)
            average.update()  # of the same step

            with average.applied():
                averaged = accelerator.get_state_dict(model)
                losses = [loss_on(accelerator, model, 0)]
            losses.append(loss_on(accelerator, model, 0))
            average.copy_to_model()
            losses.append(loss_on(accelerator, model, 0))
            found[name] = (averaged, expected, losses, {item.dtype for item in average.averages.values()})
    return found


def test_averages_are_those_of_the_gathered_weights() -> None:
    for name, (averaged, expected, losses, dtypes) in run_world(follow, 2, OTHERS, timeout=380)[0].items():
        dtype = torch.bfloat16 if OTHERS[name][-1] else torch.float32
        assert_weights(averaged, {key: value.to(dtype) for key, value in expected.items()}, name, 1e-6)
        assert losses[0] == losses[2] != losses[1], name
        assert dtypes == {torch.float32}, name


def small() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def inputs(step: int) -> torch.Tensor:
    return torch.randn(16, 4, generator=torch.Generator().manual_seed(step))


def train_small(
    accelerator: Accelerator | None, model: Any, optimizer: Any, steps: range, update: Callable[[], Any]
) -> None:
    for step in steps:
        loss = model(inputs(step)).square().mean()
        loss.backward() if accelerator is None else accelerator.backward(loss)
        optimizer.step()
        update()
        optimizer.zero_grad()


# torch cannot average integers, such as the number of batches, with equal weights.
@pytest.mark.parametrize(("kind", "use_buffers"), [("ema", False), ("ema", True), ("swa", False)])
def test_one_process_has_the_numbers_of_torch(kind: str, use_buffers: bool) -> None:
    average_of = {"ema": get_ema_multi_avg_fn(0.8), "swa": get_swa_multi_avg_fn()}[kind]
    plain, plain_optimizer = small()
    reference = AveragedModel(plain, multi_avg_fn=average_of, use_buffers=use_buffers)
    train_small(None, plain, plain_optimizer, range(5), lambda: reference.update_parameters(plain))
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(*small())
    average = accelerator.moving_average(
        model, 0.8, multi_avg_fn=None if kind == "ema" else average_of, use_buffers=use_buffers
    )
    train_small(accelerator, model, optimizer, range(5), average.update)
    with average.applied():
        found = accelerator.get_state_dict(model)
    counted = "1.num_batches_tracked"  # an average of integers makes no sense
    for name, value in reference.module.state_dict().items():
        assert name == counted or torch.equal(found[name], value), name
    assert found[counted] == 5
    assert all(torch.equal(value, plain.state_dict()[name]) for name, value in model.state_dict().items())


def in_fp8(accelerator: Accelerator | None) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))
    if accelerator is None:
        model = convert(model, FP8Recipe(scaling="delayed"))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def test_fp8_with_delayed_scaling_has_the_numbers_of_torch(tmp_path: Path) -> None:
    plain, plain_optimizer = in_fp8(None)
    reference = AveragedModel(plain, multi_avg_fn=get_ema_multi_avg_fn(0.8))
    for step in range(4):
        with torch.autocast("cpu", torch.bfloat16):
            loss = plain(inputs(step)).float().square().mean()
        loss.backward()
        plain_optimizer.step()
        reference.update_parameters(plain)
        plain_optimizer.zero_grad()
    wanted = dict(reference.module.named_parameters())

    def prepared() -> tuple[Accelerator, Any, Any, MovingAverage]:
        recipe = NativeRecipeKwargs(scaling="delayed")
        accelerator = Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=[recipe])
        model, optimizer = accelerator.prepare(*in_fp8(accelerator))
        return accelerator, model, optimizer, accelerator.moving_average(model, 0.8)

    accelerator, model, optimizer, average = prepared()
    train_small(accelerator, model, optimizer, range(2), average.update)
    accelerator.save_state(str(tmp_path / "state"))
    for resumed in (False, True):
        if resumed:
            accelerator, model, optimizer, average = prepared()
            accelerator.load_state(str(tmp_path / "state"))
        train_small(accelerator, model, optimizer, range(2, 4), average.update)
        assert isinstance(model[2], NativeLinear)
        before = copied(model.state_dict())
        with average.applied():
            for name, parameter in model.named_parameters():
                torch.testing.assert_close(parameter, wanted[name], atol=1e-6, rtol=0, msg=name)
            model(inputs(0))  # leaves the scales as they are
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_steps_that_fp16_skips_do_not_count() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="fp16")
    model, optimizer = accelerator.prepare(*small())
    average = accelerator.moving_average(model, 0.5)
    updates = []
    for factor in (1.0, float("inf"), 1.0):
        accelerator.backward(model(inputs(0)).square().mean() * factor)
        optimizer.step()
        updates.append((average.update(), optimizer.step_was_skipped))
        optimizer.zero_grad()
    assert updates == [(True, False), (False, True), (True, False)]
    assert average.num_updates == 2


def test_weights_in_16_bits_have_averages_in_32(tmp_path: Path) -> None:
    def prepared() -> tuple[Accelerator, Any, Any, Any]:
        accelerator = Accelerator(cpu=True)
        model, _ = small()
        model = model.bfloat16()
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        return accelerator, model, optimizer, accelerator.moving_average(model, 0.999)

    accelerator, model, optimizer, average = prepared()
    expected: Any = None
    for step in range(5):
        accelerator.backward(model(inputs(step).bfloat16()).square().mean())
        optimizer.step()
        average.update()
        optimizer.zero_grad()
        weight = model[0].weight.detach().float()
        expected = weight.clone() if expected is None else expected.lerp_(weight, 1 - 0.999)
    assert torch.equal(average.averages["0.weight"], expected)
    accelerator.save_state(str(tmp_path / "state"))
    accelerator, model, optimizer, average = prepared()
    accelerator.load_state(str(tmp_path / "state"))
    assert torch.equal(average.averages["0.weight"], expected) and average.num_updates == 5
    with average.applied():
        assert torch.equal(model[0].weight, expected.bfloat16())


def test_frozen_weights_take_no_memory_and_may_be_trained_later() -> None:
    plain, plain_optimizer = small()
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(*small())
    plain[0].requires_grad_(False)
    model[0].requires_grad_(False)
    reference = AveragedModel(plain, multi_avg_fn=get_ema_multi_avg_fn(0.8))
    average = accelerator.moving_average(model, 0.8)
    for steps, thawed in ((range(3), False), (range(3, 6), True)):
        plain[0].requires_grad_(thawed)
        model[0].requires_grad_(thawed)
        train_small(None, plain, plain_optimizer, steps, lambda: reference.update_parameters(plain))
        train_small(accelerator, model, optimizer, steps, average.update)
        assert ("0.weight" in average.averages) == thawed
        with average.applied():
            assert torch.equal(model[0].weight, reference.module[0].weight)
            assert torch.equal(model[2].weight, reference.module[2].weight)
    # Frozen again, the averages are started again without them.
    model[0].requires_grad_(False)
    average.reset()
    assert "0.weight" not in average.averages
    model[0].requires_grad_(True)
    before = model[0].weight.detach().clone()
    average.num_updates = 1
    train_small(accelerator, model, optimizer, range(1), average.update)
    assert torch.equal(average.averages["0.weight"], before.lerp(model[0].weight.detach(), 1 - 0.8))


class Counting(nn.Module):
    """Replaces its buffer in each forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls = self.calls + 1
        return x * self.weight


def test_buffers_that_a_forward_pass_replaces_come_back() -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(Counting())
    model(inputs(0))
    with accelerator.moving_average(model).applied():
        model(inputs(0))
        assert model.calls == 2
    assert model.calls == 1


def test_steps_of_another_model_do_not_count() -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(*small())
    other, other_optimizer = accelerator.prepare(*small())
    average = accelerator.moving_average(model)
    train_small(accelerator, other, other_optimizer, range(2), lambda: None)
    assert not average.update()
    train_small(accelerator, model, optimizer, range(1), lambda: None)
    assert average.update() and average.num_updates == 1


def test_a_block_ends_with_the_weights_and_buffers_of_training(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(*small())
    average, slow = accelerator.moving_average(model, 0.5), accelerator.moving_average(model, 0.9)
    train_small(accelerator, model, optimizer, range(4), lambda: (average.update(), slow.update()))
    before = copied(model.state_dict())
    with pytest.raises(KeyError, match="inner"), average.applied():
        averaged = copied(model.state_dict())
        assert torch.equal(averaged["0.weight"], average.averages["0.weight"])
        model(inputs(9))  # changes the statistics
        with pytest.raises(ValueError, match="innermost"), slow.applied():
            assert torch.equal(model[0].weight, slow.averages["0.weight"])
            raise ValueError("innermost")
        with slow.applied():
            accelerator.save_state(str(tmp_path / "nested"))
            assert torch.equal(model[0].weight, slow.averages["0.weight"])
        assert torch.equal(model[0].weight, averaged["0.weight"])
        kept = accelerator.get_state_dict(model)
        accelerator.save_model(model, str(tmp_path / "averaged"))
        accelerator.save_state(str(tmp_path / "state"))
        assert torch.equal(model[0].weight, averaged["0.weight"])
        assert torch.equal(model[1].running_mean, kept["1.running_mean"])
        raise KeyError("inner")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(kept["0.weight"], averaged["0.weight"])
    assert not torch.equal(kept["1.running_mean"], before["1.running_mean"])
    from safetensors.torch import load_file

    assert torch.equal(load_file(tmp_path / "averaged" / "model.safetensors")["0.weight"], averaged["0.weight"])
    for state in ("state", "nested"):
        assert torch.equal(load_file(tmp_path / state / "model.safetensors")["0.weight"], before["0.weight"])
    assert torch.equal(load_file(tmp_path / "state" / "moving_average.safetensors")["0.weight"], averaged["0.weight"])


def test_training_in_a_block_is_an_error(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(*small())
    average = accelerator.moving_average(model)
    train_small(accelerator, model, optimizer, range(1), average.update)
    accelerator.save_state(str(tmp_path / "state"))
    before = copied(model.state_dict())
    with average.applied():
        loss = model(inputs(0)).mean()
        with pytest.raises(RuntimeError, match="does not require grad"):
            loss.backward()
        for call, name in (
            (lambda: accelerator.backward(loss), r"backward\(\)"),
            (optimizer.step, r"optimizer\.step\(\)"),
            (average.update, r"update\(\)"),
            (average.reset, r"reset\(\)"),
            (average.copy_to_model, r"copy_to_model\(\)"),
            (lambda: accelerator.load_state(str(tmp_path / "state")), r"load_state\(\)"),
        ):
            with pytest.raises(
                ConfigurationError, match=rf"{name} was called while moving averages are in the Seq.*Leave"
            ):
                call()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_an_autocast_block_around_it_computes_with_the_averages() -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(4, 1))
    average = accelerator.moving_average(model)
    average.averages["weight"].zero_()
    average.averages["bias"].zero_()
    with torch.autocast("cpu", torch.bfloat16):
        assert model(inputs(0)).abs().sum() > 0
        with average.applied(), torch.enable_grad():
            assert model(inputs(0)).abs().sum() == 0
        assert model(inputs(0)).abs().sum() > 0


def test_what_cannot_be_averaged_is_refused(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    with pytest.raises(ConfigurationError, match="Sequential that is not prepared"):
        accelerator.moving_average(small()[0])
    model, optimizer = accelerator.prepare(*small())
    with pytest.raises(ConfigurationError, match=r"decay=1\.0 must be a number at least 0 and below 1"):
        accelerator.moving_average(model, 1.0)
    other = accelerator.prepare(nn.Linear(4, 1))
    average = accelerator.moving_average(other)
    accelerator.save_state(str(tmp_path / "state"))
    train_small(accelerator, model, optimizer, range(1), lambda: None)
    with pytest.raises(ConfigurationError, match="no prepared optimizer updates it"):
        average.update()
    with context.isolated():
        alone = Accelerator(cpu=True, strategy=Strategy())
        with pytest.raises(ConfigurationError, match="not been compared with one process under Strategy"):
            alone.moving_average(alone.prepare(nn.Linear(4, 1)))
    accelerator.moving_average(model)
    with pytest.raises(CheckpointError, match="1 moving average and there are 2 to load"):
        accelerator.load_state(str(tmp_path / "state"))


def keep_the_best(cases: dict[str, Any], folder: str) -> dict[str, Any]:
    """Train for two steps after the best weights, and put these back."""
    found = {}
    for name, (settings, mesh) in cases.items():
        with context.isolated():
            run = Run(settings, mesh, kind_of(name))
            best = run.accelerator.moving_average(run.model, use_buffers=True)
            run.train(0, 2)
            best.reset()
            kept = copied(run.accelerator.get_state_dict(run.model))
            run.train(2, 4)
            with torch.no_grad():
                worse = loss_of(run.model, BATCHES[0]).item()  # leaves weights gathered
            best.copy_to_model()
            with torch.no_grad():
                loss = loss_of(run.model, BATCHES[0]).item()
            found[name] = (kept, copied(run.accelerator.get_state_dict(run.model)), worse, loss)
    return found


def test_the_best_weights_come_back(tmp_path: Path) -> None:
    names = ("DDP", "FSDP 1", "FSDP 1, merged", "FSDP 2", "FSDP 2, one unit", "tp", "pp", "ep")
    cases = {name: TWO[name] for name in names}
    for name, (kept, restored, worse, loss) in run_world(keep_the_best, 2, cases, "", timeout=380)[0].items():
        plain = expected(kind_of(name), 2)
        model, _ = model_and_optimizer(kind_of(name))
        model.load_state_dict(plain["weights"])
        assert all(torch.equal(restored[key], value) for key, value in kept.items()), name
        assert_weights(restored, plain["weights"], name, 1e-6)
        assert loss == pytest.approx(loss_of(model, BATCHES[0]).item(), abs=1e-6) != worse, name


def copies_and_loads(cases: dict[str, Any]) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    found = {}
    for name, (settings, mesh) in cases.items():
        with context.isolated():
            accelerator = accelerator_of(settings, mesh)
            model = accelerator.prepare(build("gpt2"))
            for make in (copy.deepcopy, AveragedModel):
                with pytest.raises(
                    ConfigurationError, match=r"deepcopy cannot copy.*accelerator\.moving_average\(model\)"
                ):
                    make(model)
            with torch.no_grad():
                loss_of(model, BATCHES[0])  # leaves weights gathered
            state = accelerator.get_state_dict(model)
            changed = {key: value + 1 for key, value in state.items()}
            if not mesh:
                options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
                set_model_state_dict(model, dict(changed), options=options)
                found[name] = (changed, accelerator.get_state_dict(model))
                with torch.no_grad():
                    loss_of(model, BATCHES[0])
            error = "load_state_dict of the .* got .*copy_to_model.*set_model_state_dict"
            with pytest.raises(ConfigurationError, match=error):
                model.load_state_dict(state)
            accelerator.backward(loss_of(model, BATCHES[0]))  # the model can be used after it
            with torch.no_grad():
                found[f"{name}, used"] = (changed, accelerator.get_state_dict(model)) if not mesh else ({}, {})
    return found


def test_copies_and_full_state_dicts_of_sharded_models() -> None:
    cases = {name: TWO[name] for name in ("FSDP 1", "FSDP 2", "FSDP 2, one unit", "tp")}
    found = run_world(copies_and_loads, 2, cases, timeout=200)[0]
    assert set(found) == {*cases, *(f"{name}, used" for name in cases)} - {"tp"}
    for name, (changed, loaded) in found.items():
        assert_weights(loaded, changed, name, 0)


def test_models_that_are_not_sharded_can_be_copied() -> None:
    model = Accelerator(cpu=True).prepare(small()[0])
    assert torch.equal(copy.deepcopy(model)(inputs(0)), model(inputs(0)))


PERIOD = 3


def average_local_training(folder: str) -> list[dict[str, Any]]:
    """Averages in a block of LocalSGD, in between two of its averages and after it, and with a state resumed."""
    found: list[dict[str, Any]] = [{}, {}]
    for number, resumed in enumerate((False, True)):
        with context.isolated():
            accelerator = Accelerator(cpu=True)
            model, optimizer = accelerator.prepare(*small())
            average = accelerator.moving_average(model, DECAY, use_buffers=True)
            if resumed:
                accelerator.load_state(folder)
            with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=PERIOD) as local:
                for step in range(5 if resumed else 0, 8):
                    accelerator.backward(model(inputs(2 * step + accelerator.process_index)).square().mean())
                    optimizer.step()
                    average.update()
                    optimizer.zero_grad()
                    local.step()
                    if step == 4 and not resumed:
                        accelerator.save_state(folder)
                        with average.applied():
                            found[number]["within"] = copied(accelerator.unwrap_model(model).state_dict())
            with average.applied():
                found[number]["after"] = copied(accelerator.unwrap_model(model).state_dict())
    return found


def test_averages_in_local_sgd_are_those_of_the_mean_weights(tmp_path: Path) -> None:
    ranks = [small() for _ in range(2)]
    mean = small()[0]
    average = AveragedModel(mean, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    for step in range(8):
        for rank, (model, optimizer) in enumerate(ranks):
            train_small(None, model, optimizer, range(2 * step + rank, 2 * step + rank + 1), lambda: None)
        for each, *copies in zip(mean.parameters(), *(model.parameters() for model, _ in ranks), strict=True):
            each.data = torch.stack([item.detach() for item in copies]).mean(0)
            if (step + 1) % PERIOD == 0:
                for item in copies:
                    item.data = each.detach().clone()
        average.update_parameters(mean)
        if step == 4:
            within = copied(average.module.state_dict())
    after = average.module.state_dict()
    for found in run_world(average_local_training, 2, str(tmp_path)):
        for name, _ in mean.named_parameters():
            torch.testing.assert_close(found[0]["within"][name], within[name], atol=1e-6, rtol=0)
            torch.testing.assert_close(found[0]["after"][name], after[name], atol=1e-6, rtol=0)
            assert torch.equal(found[1]["after"][name], found[0]["after"][name]), "resumed"


def begin_alone() -> list[torch.Tensor]:
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(*small())
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=3):
        train_small(accelerator, model, optimizer, range(accelerator.process_index, 2), lambda: None)
        average = accelerator.moving_average(model)
    average.copy_to_model()
    return [item.detach() for item in model.parameters()]


def test_an_average_that_begins_in_local_sgd_is_equal_on_all_ranks() -> None:
    first, second = run_world(begin_alone, 2)
    assert all(torch.equal(mine, other) for mine, other in zip(first, second, strict=True))


def test_loaded_averages_are_where_the_weights_are() -> None:
    """On a GPU, for which the meta device stands: files are read into the memory of the CPU."""
    model, strategy = nn.Linear(2, 1, device="meta"), Strategy()
    model.bias.requires_grad_(False)
    prepared = SimpleNamespace(strategy=strategy, optimizers=[], applied=[], local_sgd=None)
    average = MovingAverage(model, prepared, get_ema_multi_avg_fn(DECAY), use_buffers=False)
    state = {"weight": torch.ones(1, 2), "bias": torch.ones(1)}
    average.plan_load(state, strategy.layout(model), 3, Path("state"))()
    assert {name: value.device.type for name, value in average.averages.items()} == {"weight": "meta", "bias": "meta"}


def skip_alone() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="fp16")
    model, optimizer = accelerator.prepare(*small())
    average = accelerator.moving_average(model)
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=2):
        accelerator.backward(model(inputs(0)).square().mean())
        optimizer.step()
        with pytest.raises(ConfigurationError, match="inside LocalSGD with mixed_precision='fp16'.*skip different"):
            average.update()


def test_ranks_that_skip_steps_alone_are_refused() -> None:
    run_world(skip_alone, 2)

"""torch's own clipping of norms: that of one process, or an error where a rank sees a part of the gradients."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from accel import (
    Accelerator,
    AutocastKwargs,
    DeepSpeedPlugin,
    FullyShardedDataParallelPlugin,
    GradScalerKwargs,
    ParallelismConfig,
)
from accel.parallel.axis_settings import PipelineParallelConfig
from accel_state.errors import ConfigurationError
from accel_state.imports import is_package_available
from accel_state.testing import run_world

MAX_NORM = 0.05
needs_deepspeed = pytest.mark.skipif(not is_package_available("deepspeed"), reason="needs DeepSpeed")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.head = nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(x)


def arguments(kind: str) -> dict[str, Any]:
    name, _, version = kind.partition(" ")
    if name == "fsdp":
        strategy = "NO_SHARD" if kind.endswith("whole") else None
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=int(version[0]), use_orig_params=None if version[0] == "2" else kind != "fsdp 1 flat"
        )
        if strategy is not None:
            plugin = FullyShardedDataParallelPlugin(fsdp_version=1, sharding_strategy=strategy)
        return {"fsdp_plugin": plugin}
    if name == "zero":
        return {"deepspeed_plugin": DeepSpeedPlugin(zero_stage=int(version), gradient_accumulation_steps=1)}
    if name == "pp":
        example = {"x": torch.ones(8, 6)}
        pipeline = PipelineParallelConfig(loss_fn=lambda output, _: output.square().mean(), example=example)
        return {"parallelism_config": ParallelismConfig(pp_size=2, pp_handler=pipeline)}
    return {}


def trained(kind: str) -> tuple[list[float], list[torch.Tensor]]:
    """The norms, and the weights after three steps that torch has clipped."""
    accelerator = Accelerator(cpu=True, **arguments(kind))
    torch.manual_seed(0)
    net = Net()
    samples = torch.randn(24, 6, generator=torch.Generator().manual_seed(1))
    loader = DataLoader(samples, batch_size=8 if kind in ("plain", "pp") else 4)  # type: ignore[arg-type]
    model, optimizer, loader = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.5), loader)
    norms = []
    for batch in loader:
        accelerator.backward(model(x=batch, labels=batch).loss if kind == "pp" else model(batch).square().mean())
        norm: Any = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        norms.append(float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm))
        optimizer.step()
        optimizer.zero_grad()
    state = accelerator.get_state_dict(model)
    return norms, [value.clone() for value in state.values()]


def refused(kind: str) -> str:
    with pytest.raises(ConfigurationError) as caught:
        trained(kind)
    return str(caught.value)


@pytest.mark.parametrize("kind", ["ddp", "fsdp 2", "fsdp 1 whole", pytest.param("zero 0", marks=needs_deepspeed)])
def test_gradients_that_each_rank_has_whole_are_clipped(kind: str) -> None:
    ((norms, weights),) = run_world(trained, 1, "plain")
    assert min(norms) > 2 * MAX_NORM
    ranks = run_world(trained, 2, kind, timeout=200)
    assert [found for found, _ in ranks] == [pytest.approx(norms, rel=1e-5)] * 2
    for one, other in zip(ranks[0][1], weights, strict=True):  # rank 0 gathers them
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


def test_gradients_that_are_multiplied_by_the_loss_scale_are_refused_until_they_are_divided() -> None:
    norms = []
    for name in ("unscale_gradients", "clip_grad_norm_"):
        accelerator = Accelerator(cpu=True, mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=64)])
        torch.manual_seed(0)
        net = Net()
        model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.5))
        accelerator.backward(model(torch.ones(2, 6)).square().mean())
        with pytest.raises(ConfigurationError, match="multiplied by the loss scale"):
            nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        with pytest.raises(ConfigurationError, match="multiplied by the loss scale"):
            nn.utils.clip_grads_with_norm_(model.parameters(), MAX_NORM, torch.ones(()))
        with pytest.raises(ConfigurationError, match="accelerator.clip_grad_value_"):
            nn.utils.clip_grad_value_(model.parameters(), MAX_NORM)
        getattr(accelerator, name)(*((model.parameters(), MAX_NORM) if name == "clip_grad_norm_" else ()))
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        norms.append([parameter.grad.norm().item() for parameter in net.parameters()])
        optimizer.step()
        accelerator.free_memory()
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)
    assert sum(norm**2 for norm in norms[0]) ** 0.5 == pytest.approx(MAX_NORM, rel=1e-3)


def test_gradients_of_parameters_that_were_added_later_are_refused_too() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=64)])
    net = Net()
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.head.parameters(), lr=0.5))
    optimizer.add_param_group({"params": list(net.blocks.parameters())})
    accelerator.backward(model(torch.ones(2, 6)).square().mean())
    with pytest.raises(ConfigurationError, match="multiplied by the loss scale"):
        nn.utils.clip_grad_norm_(net.blocks.parameters(), MAX_NORM)


def scaled_by_hand(steps: int, fused: bool, prepared: bool, **settings: Any) -> list[torch.Tensor]:
    """The weights of a loop with torch's own loss scaler, which steps when a window ends."""
    torch.manual_seed(0)
    net = Net()
    optimizer: Any = torch.optim.Adam(net.parameters(), lr=0.01, eps=0.01, fused=fused)
    loader: Any = DataLoader(torch.randn(24, 6, generator=torch.Generator().manual_seed(1)), batch_size=4)  # type: ignore[arg-type]
    scaler = torch.amp.GradScaler("cpu", init_scale=64)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps, **settings)
    if prepared:
        net, optimizer, loader = accelerator.prepare(net, optimizer, loader)
    for number, batch in enumerate(loader, 1):
        loss = scaler.scale(net(batch).square().mean())
        if prepared:
            with accelerator.accumulate(net):
                accelerator.backward(loss)
                ends = accelerator.sync_gradients
        else:
            (loss / steps).backward()
            ends = number % steps == 0
        if ends:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    accelerator.end_training()
    return [parameter.detach() for parameter in net.parameters()]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("steps", [1, 2])
def test_a_loss_scaler_of_the_script_steps_as_in_plain_torch(steps: int, fused: bool) -> None:
    pairs = zip(scaled_by_hand(steps, fused, True), scaled_by_hand(steps, fused, False), strict=True)
    for ours, plain in pairs:
        torch.testing.assert_close(ours, plain, rtol=0, atol=1e-7)


@pytest.mark.parametrize("fused", [False, True])
def test_a_loss_scaler_of_the_script_takes_the_place_of_a_disabled_one(fused: bool) -> None:
    settings = [GradScalerKwargs(enabled=False), AutocastKwargs(enabled=False)]
    found = scaled_by_hand(2, fused, True, mixed_precision="fp16", kwargs_handlers=settings)
    for ours, plain in zip(found, scaled_by_hand(2, fused, False), strict=True):
        torch.testing.assert_close(ours, plain, rtol=0, atol=1e-7)


def test_a_fused_optimizer_steps_without_a_loss_scale() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(enabled=False)])
    net = nn.Linear(2, 1)
    nn.init.ones_(net.weight)
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.25, fused=True))
    accelerator.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    assert net.weight.tolist() == [[0.75, 0.75]]
    assert (optimizer.steps_taken, optimizer.step_was_skipped) == (1, False)


def test_a_loss_scaler_of_the_script_that_would_divide_gradients_twice_is_refused() -> None:
    for settings, message in (
        ({"gradient_accumulation_steps": 2}, "sync_gradients"),
        ({"mixed_precision": "fp16"}, "Remove"),
    ):
        accelerator = Accelerator(cpu=True, **settings)  # type: ignore[arg-type]
        net = Net()
        model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.5))
        scaler = torch.amp.GradScaler("cpu")
        with accelerator.accumulate(model):
            accelerator.backward(scaler.scale(model(torch.ones(2, 6)).square().mean()))
            with pytest.raises(ConfigurationError, match=message):
                scaler.step(optimizer)
        accelerator.end_training()
        del accelerator, model, optimizer


def test_a_model_that_was_trained_in_fp16_is_freed() -> None:
    accelerator, net = Accelerator(cpu=True, mixed_precision="fp16"), Net()
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.5))
    kept = weakref.ref(net.head.weight)
    accelerator.free_memory()
    del accelerator, net, model, optimizer
    gc.collect()
    assert kept() is None


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("fsdp 1", "each rank has its part"),
        ("fsdp 1 flat", "each rank has its part"),
        pytest.param("zero 1", "DeepSpeed keeps its gradients", marks=needs_deepspeed),
        pytest.param("zero 3", "DeepSpeed keeps its gradients", marks=needs_deepspeed),
        ("pp", "its stage of the pipeline"),
    ],
)
def test_a_norm_over_a_part_of_the_gradients_is_refused(kind: str, reason: str) -> None:
    for message in run_world(refused, 2, kind, timeout=200):
        assert reason in message and "accelerator.clip_grad_norm_(model.parameters(), max_norm)" in message


def trained_by_old_parameters(kind: str, function: str) -> tuple[list[float], list[torch.Tensor]]:
    """The norms, and the weights after three steps that clip the gradients of parameters listed before prepare()."""
    accelerator = Accelerator(cpu=True, **arguments(kind))
    torch.manual_seed(0)
    net = Net()
    samples: Any = torch.randn(24, 6, generator=torch.Generator().manual_seed(1))
    loader = DataLoader(samples, batch_size=8 if kind == "plain" else 4)
    parameters = list(net.parameters())
    model, optimizer, loader = accelerator.prepare(net, torch.optim.SGD(parameters, lr=0.5), loader)
    norms = []
    for batch in loader:
        accelerator.backward(model(batch).square().mean())
        norm = getattr(accelerator, function)(parameters, MAX_NORM)
        norms.append(0.0 if norm is None else float(norm))
        optimizer.step()
        optimizer.zero_grad()
    if kind in ("fsdp 1 flat", "fsdp 2"):
        for clip in (nn.utils.clip_grad_norm_, nn.utils.clip_grad_value_):
            with pytest.raises(ConfigurationError, match=r"prepare\(\) has replaced its parameters"):
                clip(parameters, MAX_NORM)
    if kind == "fsdp 1 flat":
        with pytest.raises(ConfigurationError, match="a call that clips gradients has 2 of the model's 10"):
            accelerator.clip_grad_norm_(parameters[:2], MAX_NORM)
        with pytest.raises(ConfigurationError, match="other modules have none"):
            accelerator.clip_grad_norm_(accelerator.unwrap_model(model).head.parameters(), MAX_NORM)
    return norms, [value.clone() for value in accelerator.get_state_dict(model).values()]


@pytest.mark.parametrize("function", ["clip_grad_norm_", "clip_grad_value_"])
@pytest.mark.parametrize("kind", ["fsdp 1", "fsdp 1 flat", "fsdp 2"])
def test_parameters_from_before_prepare_are_clipped(kind: str, function: str) -> None:
    ((norms, weights),) = run_world(trained_by_old_parameters, 1, "plain", function)
    ranks = run_world(trained_by_old_parameters, 2, kind, function, timeout=200)
    assert [found for found, _ in ranks] == [pytest.approx(norms, rel=1e-5)] * 2
    for one, other in zip(ranks[0][1], weights, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


def refused_by_value() -> str:
    accelerator, net = Accelerator(cpu=True, **arguments("zero 1")), Net()
    loader = DataLoader(torch.ones(8, 6), batch_size=4)  # type: ignore[arg-type]
    model, optimizer, loader = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.5), loader)
    accelerator.backward(model(next(iter(loader))).square().mean())
    with pytest.raises(ConfigurationError) as caught:
        nn.utils.clip_grad_value_(model.parameters(), MAX_NORM)
    flat = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for clip in (accelerator.clip_grad_norm_, accelerator.clip_grad_value_):
        with pytest.raises(ConfigurationError, match="none of which is one of a model"):
            clip(flat, MAX_NORM)
    return str(caught.value)


@needs_deepspeed
def test_values_of_gradients_that_a_rank_does_not_see_are_refused() -> None:
    for message in run_world(refused_by_value, 2, timeout=200):
        assert "clip_grad_value_ cannot clip this model: DeepSpeed keeps its gradients elsewhere" in message

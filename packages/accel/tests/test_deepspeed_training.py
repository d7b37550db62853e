"""DeepSpeed engines equal plain PyTorch: all stages, offload, accumulation, clipping, precision; and errors."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from deepspeed_runs import (
    BATCH,
    MISSING,
    OPTIMIZERS,
    STEPS,
    TOLERANCE,
    accelerator_of,
    adamw,
    check_same,
    config,
    data,
    differences,
    groups,
    loss_of,
    net,
    offloading,
    plain,
    release,
    train,
    weights_of,
)
from torch import nn
from torch.utils.data import DataLoader

from accel.deepspeed.runtime import GatheredParameters
from accel_state.errors import ConfigurationError, MissingDependencyError
from accel_state.testing import run_world

pytestmark = [pytest.mark.skipif(bool(MISSING), reason=MISSING or "deepspeed is installed"), pytest.mark.timeout(600)]

# name: (configuration, arguments of train, arguments of plain). 20 steps; windows of 3 end with a short one of 2.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    **{f"stage {stage}": (config(stage), {}) for stage in (0, 1, 2, 3)},
    **{f"stage {stage} offloaded": (offloading(stage), {}) for stage in (1, 2, 3)},
    **{f"stage {stage} in windows": (config(stage), {"window": 3, "clip": 0.2}) for stage in (0, 1, 2, 3)},
    **{f"stage {stage} offloaded in windows": (offloading(stage), {"window": 3, "clip": 0.2}) for stage in (1, 2, 3)},
    "another optimizer": (config(2), {"optimizer": "sgd", "clip": 0.2}),
    "states from the beginning": (config(2), {"optimizer": "adagrad", "clip": 0.2}),
    "states from the beginning, divided": (config(3), {"optimizer": "adagrad"}),
    "states from the beginning, offloaded": (offloading(1), {"optimizer": "adagrad"}),
    "frozen parameters": (config(2), {"frozen": True, "clip": 0.2}),
    "frozen parameters, divided": (config(3), {"frozen": True, "clip": 0.2}),
    "clipped as configured": ({**config(2), "gradient_clipping": 0.2}, {"clip": 0.2}),
}


def run_cases(names: list[str]) -> dict[str, dict[str, Any]]:
    return {name: train(CASES[name][0], **CASES[name][1]) for name in names}


@functools.cache
def found() -> dict[str, dict[str, Any]]:
    """The results of all cases, trained once; tests run in any order."""
    return run_world(run_cases, 2, list(CASES), timeout=500)[0]


@pytest.mark.slow  # starts DeepSpeed's engines for each case; test_windows is in the fast tier
@pytest.mark.parametrize("name", CASES)
def test_equals_plain_pytorch(name: str) -> None:
    arguments = CASES[name][1]
    expected = plain(**arguments)
    check_same(found()[name], expected)
    assert found()[name]["steps"] == len(expected["norms"])


def computes_in_fp16() -> bool:
    """Whether this CPU has the kernels that DeepSpeed needs."""
    from deepspeed.accelerator import get_accelerator

    return bool(get_accelerator().is_fp16_supported())


def train_on_cpu() -> dict[str, Any]:
    results: dict[str, Any] = {f"stage {stage}": train(config(stage), mixed_precision="bf16") for stage in (1, 2, 3)}
    if computes_in_fp16():
        # At the default scale of 65536 the first steps would overflow, and be skipped.
        results["fp16"] = train({**config(2), "fp16": {"enabled": True, "initial_scale_power": 8, "auto_cast": True}})
    else:
        with pytest.raises(ConfigurationError, match="DeepSpeed.*fp16.*'bf16'.*'no'"):
            train(config(2), mixed_precision="fp16")
    results["copies in groups"] = train(config(3, zero={"zero_hpz_partition_size": 2}))
    for name in ("zero_quantized_weights", "zero_quantized_gradients"):
        with pytest.raises(ConfigurationError, match=f"zero_optimization.{name}: "):
            train(config(3, zero={name: True}))
    accelerator = accelerator_of({**config(2), "bf16": {"enabled": True}})
    model, _, loader = accelerator.prepare(model := net(), adamw(model.parameters()), DataLoader(data(), batch_size=4))
    results["from the configuration"] = (
        accelerator.mixed_precision,
        next(model.parameters()).dtype,
        accelerator.native_amp,
    )
    del model, loader
    release(accelerator)
    return results


@pytest.mark.slow  # trains with three stages of DeepSpeed and in fp32; test_windows is in the fast tier
def test_precisions_on_cpu() -> None:
    """After 20 steps in bf16, losses and weights are within 0.05 of fp32."""
    results = run_world(train_on_cpu, 2, timeout=500)[0]
    expected = plain()
    for stage in (1, 2, 3):
        worst = differences(results[f"stage {stage}"], expected)
        assert worst["losses"] < 0.05 and worst["weights"] < 0.05, worst
        assert differences(results[f"stage {stage}"], expected)["losses"] > 0
    check_same(results["copies in groups"], expected)
    if "fp16" in results:
        assert results["fp16"]["steps"] == STEPS
        assert differences(results["fp16"], expected)["losses"] < 0.05
    assert results["from the configuration"] == ("bf16", torch.bfloat16, False)


def prepared(settings: dict[str, Any], steps: int = STEPS, **arguments: Any) -> tuple[Any, ...]:
    accelerator, model = accelerator_of(settings, **arguments), net()
    loader = DataLoader(data(steps), batch_size=BATCH // accelerator.num_processes)
    return accelerator, *accelerator.prepare(model, adamw(groups(model)), loader)


def by_items(settings: dict[str, Any]) -> list[float]:
    """Accumulation windows with different numbers of items, normalised per item."""
    accelerator, model, opt, loader = prepared(settings, 5, gradient_accumulation_steps=2)
    norms = []
    for index, (x, y) in enumerate(loader):
        with accelerator.accumulate(model):
            kept = len(x) - index % 2
            loss = loss_of(model, x[:kept], y[:kept])
            accelerator.backward(loss, num_items=kept)
            if accelerator.sync_gradients:
                norms.append(accelerator.clip_grad_norm_(model.parameters(), 1e9).item())
            opt.step()
            opt.zero_grad()
    release(accelerator)
    return norms


def plain_by_items(ranks: int) -> list[float]:
    model = net()
    opt = adamw(groups(model))
    chunks = list(DataLoader(data(5), batch_size=BATCH))
    norms = []
    for begin in range(0, 5, 2):
        total, items = 0.0, 0
        for index, (x, y) in enumerate(chunks[begin : begin + 2], begin):
            for xs, ys in zip(x.chunk(ranks), y.chunk(ranks), strict=True):
                kept = len(xs) - index % 2
                total, items = total + loss_of(model, xs[:kept], ys[:kept]) * kept, items + kept
        (total / items).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1e9).item())
        opt.step()
        opt.zero_grad()
    return norms


def counting_itself(settings: dict[str, Any]) -> tuple[list[bool], dict[str, torch.Tensor]]:
    """A loop without accumulate(): the engine counts micro batches."""
    accelerator, model, opt, loader = prepared({**settings, "gradient_accumulation_steps": 4})
    ends = []
    for x, y in loader:
        accelerator.backward(loss_of(model, x, y))
        opt.step()
        opt.zero_grad()
        ends.append(accelerator.sync_gradients)
    assert accelerator.gradient_accumulation_steps == 4 and opt.steps_taken == STEPS // 4
    weights = weights_of(accelerator.get_state_dict(model))
    release(accelerator)
    return ends, weights


def dividing_itself(settings: dict[str, Any]) -> dict[str, torch.Tensor]:
    """A loop as Transformers' Trainer has it: it divides the losses, and says which backward pass ends a window."""
    accelerator, model, opt, loader = prepared({**settings, "gradient_accumulation_steps": 3})
    for index, (x, y) in enumerate(loader):
        ends_window = (index + 1) % 3 == 0 or index + 1 == STEPS
        accelerator.gradient_state._set_sync_gradients(ends_window)
        micro_batches = 3 if index < STEPS // 3 * 3 else STEPS % 3
        accelerator.backward(loss_of(model, x, y) / micro_batches, scale_wrt_gas=False)
        if ends_window:
            opt.step()
            opt.zero_grad()
    assert opt.steps_taken == -(-STEPS // 3)
    weights = weights_of(accelerator.get_state_dict(model))
    release(accelerator)
    return weights


def by_hand(settings: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Windows of two with no_sync(), and discarded gradients."""
    accelerator, model, opt, loader = prepared(settings)
    batches = list(loader)
    for first, second in zip(batches[0::2], batches[1::2], strict=True):
        accelerator.backward(loss_of(model, *first) * 100)
        opt.zero_grad()
        with accelerator.no_sync(model):
            accelerator.backward(loss_of(model, *first) / 2)
        accelerator.backward(loss_of(model, *second) / 2)
        opt.step()
        opt.step()  # there is nothing left to step with
        opt.zero_grad()
    assert opt.steps_taken == STEPS // 2
    weights = weights_of(accelerator.get_state_dict(model))
    release(accelerator)
    return weights


def run_windows(names: list[Any]) -> dict[str, Any]:
    every = {0: config(0), 1: config(1), 2: config(2), 3: config(3), "offloaded": offloading(2)}
    kinds = {name: every[name] for name in names}
    return {
        "items": {kind: by_items(settings) for kind, settings in kinds.items()},
        "counting": {kind: counting_itself(settings) for kind, settings in kinds.items()},
        "by hand": {kind: by_hand(settings) for kind, settings in kinds.items()},
        "dividing": {kind: dividing_itself(kinds[kind]) for kind in names if kind in (1, 3)},
    }


# Two stages show what the others and one rank show.
@pytest.mark.parametrize(
    ("ranks", "kinds"),
    [
        (2, [1, 3]),
        pytest.param(2, [0, 2, "offloaded"], marks=pytest.mark.slow),
        pytest.param(1, [0, 1, 2, 3, "offloaded"], marks=pytest.mark.slow),
    ],
    ids=["two ranks", "two ranks, other stages", "one rank"],
)
def test_windows(ranks: int, kinds: list[Any]) -> None:
    results = run_world(run_windows, ranks, kinds, timeout=500)[0]
    assert list(results["items"]) == kinds
    for kind, norms in results["items"].items():
        assert norms == pytest.approx(plain_by_items(ranks), abs=TOLERANCE), kind
    for kind, (ends, weights) in results["counting"].items():
        assert ends == [False, False, False, True] * (STEPS // 4), kind
        check_same({"losses": [0], "norms": [0], "weights": weights}, {**plain(window=4), "losses": [0], "norms": [0]})
    for name, window in (("by hand", 2), ("dividing", 3)):
        for kind, weights in results[name].items():
            expected = plain(window=window)["weights"]
            assert max((weights[k] - value).abs().max().item() for k, value in expected.items()) < TOLERANCE, kind


def with_a_scheduler(stage: int) -> dict[str, torch.Tensor]:
    accelerator = accelerator_of(config(stage))
    model = net()
    opt = OPTIMIZERS["adagrad"](groups(model))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(opt, 0.5)
    loader = DataLoader(data(), batch_size=BATCH // accelerator.num_processes)
    model, opt, scheduler, loader = accelerator.prepare(model, opt, scheduler, loader)
    for x, y in loader:
        accelerator.backward(loss_of(model, x, y))
        opt.step()
        scheduler.step()
        opt.zero_grad()
    found = weights_of(accelerator.get_state_dict(model))
    del model, opt, scheduler, loader
    release(accelerator)
    return found


def run_with_a_scheduler() -> dict[int, dict[str, torch.Tensor]]:
    return {stage: with_a_scheduler(stage) for stage in (1, 3)}


@pytest.mark.slow  # starts DeepSpeed's engine for each stage; test_windows is in the fast tier
def test_a_scheduler_reaches_adagrad() -> None:
    """DeepSpeed would replace Adagrad by a new one, which the script's scheduler does not reach."""
    model = net()
    opt = OPTIMIZERS["adagrad"](groups(model))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(opt, 0.5)
    for x, y in DataLoader(data(), batch_size=BATCH):
        loss_of(model, x, y).backward()
        opt.step()
        for _ in range(2):  # once for each process
            scheduler.step()
        opt.zero_grad()
    for stage, weights in run_world(run_with_a_scheduler, 2, timeout=500)[0].items():
        assert max((weights[k] - value).abs().max().item() for k, value in weights_of(model).items()) < TOLERANCE, stage


def run_without_a_compiler() -> dict[str, str]:
    from deepspeed.ops.op_builder import AsyncIOBuilder, CPUAdamBuilder

    from accel.deepspeed.runtime import log_operator_builds

    accelerator = accelerator_of(config(2))
    nothing = {"is_compatible": lambda self, verbose=False: False}
    said = {}
    for builder in (AsyncIOBuilder, CPUAdamBuilder):
        with (
            mock.patch.multiple(builder, **nothing),
            log_operator_builds(),
            pytest.raises(MissingDependencyError) as caught,
        ):
            builder().jit_load()
        said[builder.__name__] = str(caught.value)
    release(accelerator)
    return said


def test_errors_of_operator_builds() -> None:
    said = run_world(run_without_a_compiler, 1, timeout=300)[0]
    assert (
        "offload to nvme needs libaio" in said["AsyncIOBuilder"] and "apt install libaio-dev" in said["AsyncIOBuilder"]
    )
    assert "cannot compile its operator cpu_adam" in said["CPUAdamBuilder"]


def refused(message: str, call: Any, *arguments: Any, **named: Any) -> None:
    with pytest.raises(ConfigurationError) as caught:
        call(*arguments, **named)
    assert message in str(caught.value), caught.value


def run_errors() -> None:
    accelerator, model, other = accelerator_of(config(2)), net(), net()
    opt, loader, prepare = adamw(model.parameters()), DataLoader(data(), batch_size=4), accelerator.prepare
    both = adamw([*model.parameters(), *other.parameters()])
    without = "AdamW was passed to prepare without the model that it updates"
    refused("no model with an optimizer was prepared", accelerator.backward, torch.ones((), requires_grad=True))
    refused(without, prepare, opt)
    refused(without, accelerator.prepare_optimizer, opt)
    refused(without, prepare, net(), opt, loader)
    two = adamw(model.first.parameters())
    refused("Net was passed to prepare with two optimizers", prepare, model, opt, two, loader)
    refused("AdamW has 6 parameters that do not belong to Net", prepare, model, both, loader)
    model, opt, loader = prepare(model, opt, loader)
    x, y = next(iter(loader))
    loss_of(model, x, y).backward()
    refused("accelerator.backward(loss) in place of it", opt.step)
    unsupported = (
        "backward got create_graph, which DeepSpeed does not support. It takes retain_graph and scale_wrt_gas."
    )
    refused(unsupported, accelerator.backward, loss_of(model, x, y), create_graph=True)
    accelerator.backward(loss_of(model, x, y))
    clip, some = accelerator.clip_grad_norm_, list(model.parameters())[:2]
    refused("norm_type=1.0: DeepSpeed clips by the 2-norm", clip, model.parameters(), 1.0, 1.0)
    refused("clip_grad_norm_ got 2 parameters, without 4 that are trained", clip, some, 1.0)
    refused("clip_grad_value_ at ZeRO stage 2", accelerator.clip_grad_value_, model.parameters(), 0.1)
    refused("DeepSpeed's engine steps without a closure", opt.step, lambda: None)
    refused("groups cannot be added later", opt.add_param_group, {"params": []})
    release(accelerator)

    accelerator, model = accelerator_of(config(2, zero={"offload_optimizer": {"device": "cpu"}})), net()
    for opt, name in (
        (torch.optim.SGD(model.parameters(), lr=1.0), "SGD"),
        (torch.optim.AdamW(model.parameters(), maximize=True), "AdamW(maximize=True)"),
    ):
        refused(f"offload_optimizer_device='cpu' with {name}", accelerator.prepare, model, opt, DataLoader(data()))
    release(accelerator)

    accelerator = accelerator_of({"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": "auto"})
    model = net()
    model, optimizer, loader = accelerator.prepare(model, adamw(model.parameters()), DataLoader(data(), batch_size=4))
    allow = "Allow it with DeepSpeedPlugin(zero3_save_16bit_model=True)"
    refused(allow, accelerator.get_state_dict, model)
    x, y = next(iter(loader))
    loss_of(model, x, y).backward()
    refused("accelerator.backward(loss) in place of it", optimizer.step)
    release(accelerator)


def test_bad_input() -> None:
    run_world(run_errors, 1, timeout=500)


def switching(stage: int, joins: bool, **arguments: Any) -> dict[str, torch.Tensor]:
    """The weights after steps in some of which the middle layer is frozen."""
    accelerator, model = accelerator_of(config(stage), **arguments), net(frozen=joins)
    loader = DataLoader(data(4), batch_size=BATCH // accelerator.num_processes)
    model, opt, loader = accelerator.prepare(model, adamw(model.parameters()), loader)
    try:
        for number, (x, y) in enumerate(loader):
            accelerator.unwrap_model(model).middle.requires_grad_(number > 0 if joins else number not in (1, 2))
            accelerator.backward(loss_of(model, x, y))
            opt.step()
            opt.zero_grad()
        return weights_of(accelerator.get_state_dict(model))
    finally:
        release(accelerator)


def plain_switching(joins: bool) -> dict[str, torch.Tensor]:
    model = net(frozen=joins)
    opt = adamw(model.parameters())
    for number, (x, y) in enumerate(DataLoader(data(4), batch_size=BATCH)):
        model.middle.requires_grad_(number > 0 if joins else number not in (1, 2))
        loss_of(model, x, y).backward()
        opt.step()
        opt.zero_grad()
    return weights_of(model)


def run_switching() -> list[dict[str, torch.Tensor]]:
    for stage in (1, 2, 3):
        refused("middle.weight was frozen when its Net was prepared and is trainable now", switching, stage, True)
        refused("middle.weight was trainable when its Net was prepared and is frozen now", switching, stage, False)
    refused("DeepSpeed at ZeRO stage 1 updates the same parameters", switching, 1, False, mixed_precision="bf16")
    return [switching(0, joins) for joins in (False, True)]


def test_layers_are_frozen_and_trained_later_as_in_one_process_or_refused() -> None:
    for joins, found in enumerate(run_world(run_switching, 2, timeout=500)[0]):
        torch.testing.assert_close(found, plain_switching(bool(joins)), rtol=1e-5, atol=1e-5)


def two_losses(stage: int, how: str) -> dict[str, torch.Tensor]:
    """The weights after three steps with two backward passes each."""
    accelerator, model = accelerator_of(config(stage)), net()
    loader = DataLoader(data(3), batch_size=BATCH // accelerator.num_processes)
    model, opt, loader = accelerator.prepare(model, adamw(model.parameters()), loader)
    try:
        for x, y in loader:
            with accelerator.no_sync(model) if how == "no_sync" else nullcontext():
                first = loss_of(model, x, y)
                second = loss_of(model, 2 * x, y) if how == "before" else None
                accelerator.backward(first)
            accelerator.backward(loss_of(model, 2 * x, y) if second is None else second)
            opt.step()
            opt.zero_grad()
        return weights_of(accelerator.get_state_dict(model))
    finally:
        release(accelerator)


def run_two_losses() -> list[dict[str, torch.Tensor]]:
    for stage in (1, 2):
        for how in ("after", "before"):
            refused("Add the losses and call backward once, or enter `with accelerator.no_sync", two_losses, stage, how)
    refused("stage 3 would drop the gradients of the first call", two_losses, 3, "before")
    return [two_losses(*case) for case in ((0, "after"), (1, "no_sync"), (2, "no_sync"), (3, "after"))]


def test_gradients_of_two_backward_passes_are_added_or_refused() -> None:
    model = net()
    opt = adamw(model.parameters())
    for x, y in DataLoader(data(3), batch_size=BATCH):
        loss_of(model, x, y).backward()
        loss_of(model, 2 * x, y).backward()
        opt.step()
        opt.zero_grad()
    for weights in run_world(run_two_losses, 2, timeout=500)[0]:
        torch.testing.assert_close(weights, weights_of(model), rtol=1e-5, atol=1e-5)


NONE_GATHERED = {"stage3_param_persistence_threshold": 0}


def decay(parameter: torch.Tensor) -> None:
    with torch.no_grad():
        parameter.mul_(0.9)


def clamp(parameter: torch.Tensor) -> None:
    parameter.data.clamp_(-0.2, 0.2)


def modify(parameter: torch.Tensor) -> None:
    """Change a parameter at stage 3 as DeepSpeed's documentation does."""
    with GatheredParameters(parameter, modifier_rank=0):
        parameter.data.mul_(0.9)


def replace(parameter: torch.Tensor) -> None:
    parameter.data = parameter.data.clone()


def restore(parameter: torch.Tensor) -> None:
    """Change values and put them back, as an evaluation with averaged weights does."""
    with torch.no_grad():
        values = parameter.clone()
        parameter.zero_()
        parameter.copy_(values)


def changing(
    settings: dict[str, Any], change: Callable[[torch.Tensor], Any], bias: float = 1.0, **arguments: Any
) -> dict[str, torch.Tensor]:
    """The weights after three steps, with a change to all of them after the first step."""
    accelerator, model = accelerator_of(settings, **arguments), net()
    with torch.no_grad():
        model.last.bias[0] *= bias
    loader = DataLoader(data(3), batch_size=BATCH // accelerator.num_processes)
    model, opt, loader = accelerator.prepare(model, adamw(model.parameters()), loader)
    try:
        for number, (x, y) in enumerate(loader):
            accelerator.backward(loss_of(model, x, y))
            opt.step()
            opt.zero_grad()
            if number == 0:
                for parameter in model.parameters():
                    change(parameter)
        return weights_of(accelerator.get_state_dict(model))
    finally:
        release(accelerator)


def run_changes() -> list[dict[str, torch.Tensor]]:
    for settings in (config(1), config(2), config(3), offloading(1)):
        for change in (decay, clamp):
            refused("weight was changed outside of the optimizer. DeepSpeed at ZeRO", changing, settings, change)
    refused("changed outside of the optimizer", changing, config(2), clamp, mixed_precision="bf16")
    refused("changed outside of the optimizer", changing, config(1), replace)
    refused("changed outside of the optimizer", changing, config(3, zero=NONE_GATHERED), modify)
    # NaN is unequal to itself, but id() changes nothing.
    skipped = [changing(config(stage), id, float("nan")) for stage in (1, 3)]
    return [*(changing(config(stage), restore) for stage in (1, 2, 3)), changing(config(0), decay), *skipped]


def plain_changing(change: Callable[[torch.Tensor], None]) -> dict[str, torch.Tensor]:
    model = net()
    opt = adamw(model.parameters())
    for number, (x, y) in enumerate(DataLoader(data(3), batch_size=BATCH)):
        loss_of(model, x, y).backward()
        opt.step()
        opt.zero_grad()
        if number == 0:
            for parameter in model.parameters():
                change(parameter)
    return weights_of(model)


def test_changes_to_weights_between_steps_are_refused_or_kept() -> None:
    """ZeRO would overwrite them with its master weights; stage 0 has none."""
    found = run_world(run_changes, 2, timeout=500)[0]
    for weights in found[4:]:
        assert weights["last.bias"].isnan().any()
    for weights, change in zip(found[:4], (restore, restore, restore, decay), strict=True):
        torch.testing.assert_close(weights, plain_changing(change), rtol=1e-5, atol=1e-5)

"""Moving averages of the weights of DeepSpeed engines, against torch's AveragedModel in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed_runs import (
    BATCH,
    MISSING,
    accelerator_of,
    config,
    data,
    groups,
    loss_of,
    net,
    offloading,
    release,
    weights_of,
)
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader

from accel_state.errors import ConfigurationError
from accel_state.testing import run_world

pytestmark = [pytest.mark.skipif(bool(MISSING), reason=MISSING or "deepspeed is installed"), pytest.mark.timeout(500)]

DECAY, WINDOW, STEPS, SAVED = 0.7, 2, 4, 2
CASES: dict[str, dict[str, Any]] = {
    **{f"stage {stage}": config(stage) for stage in (0, 1, 2, 3)},
    "stage 2 in turns": config(2, zero={"round_robin_gradients": True}),
    "stage 3, all gathered": config(3, zero={"stage3_param_persistence_threshold": 10_000}),
    "stage 3, none gathered": config(3, zero={"stage3_param_persistence_threshold": 0, "sub_group_size": 60}),
    "stage 3, copies on each node": config(3, zero={"zero_hpz_partition_size": 2}),
    **{f"stage {stage} offloaded": offloading(stage) for stage in (1, 2, 3)},
}


def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    """AdamW, whose states DeepSpeed converts for other numbers of processes, and which does not amplify rounding."""
    return torch.optim.AdamW(groups(model), lr=1e-2, eps=1e-3)


def batches() -> list[Any]:
    return list(DataLoader(data(STEPS * WINDOW), batch_size=BATCH))


def expected() -> dict[str, Any]:
    model = net(frozen=True)
    optimizer = optimizer_of(model)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    for step in range(STEPS):
        for batch in batches()[step * WINDOW : (step + 1) * WINDOW]:
            (loss_of(model, *batch) / WINDOW).backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
    loss = loss_of(average.module, *batches()[0]).item()
    return {"average": weights_of(average.module), "weights": weights_of(model), "loss": loss}


class Run:
    def __init__(self, settings: dict[str, Any], folder: str = "", **arguments: Any) -> None:
        self.accelerator = accelerator_of(settings, gradient_accumulation_steps=WINDOW, **arguments)
        model = net(frozen=True)
        loader = DataLoader(data(), batch_size=BATCH)  # from which DeepSpeed learns the size of batches
        self.model, self.optimizer, _ = self.accelerator.prepare(model, optimizer_of(model), loader)
        self.average = self.accelerator.moving_average(self.model, DECAY)
        if folder:
            self.accelerator.load_state(folder)

    def train(self, begin: int, end: int) -> None:
        for micro, batch in enumerate(batches()[begin * WINDOW : end * WINDOW]):
            with self.accelerator.accumulate(self.model):
                self.accelerator.backward(loss_of(self.model, *batch))
                self.optimizer.step()
                assert self.average.update() == ((micro + 1) % WINDOW == 0)
                self.optimizer.zero_grad()
            if begin == 0 and micro in (2, 3):  # in an open window, and after it
                before = weights_of(self.accelerator.get_state_dict(self.model))
                with self.average.applied():
                    loss_of(self.model, *batch)
                    self.refuse_to_train()
                after = weights_of(self.accelerator.get_state_dict(self.model))
                assert all(torch.equal(value, after[name]) for name, value in before.items())

    def refuse_to_train(self) -> None:
        with pytest.raises(ConfigurationError, match=r"optimizer\.step\(\) was called while moving averages"):
            self.optimizer.step()

    def found(self) -> dict[str, Any]:
        with self.average.applied():
            loss = loss_of(self.model, *batches()[0]).item()
            average = self.accelerator.get_state_dict(self.model)
        weights = weights_of(self.accelerator.get_state_dict(self.model))
        return {"average": weights_of(average), "weights": weights, "loss": loss}


def train_all(cases: dict[str, Any], folder: str) -> dict[str, Any]:
    found = {}
    for name, settings in cases.items():
        run = Run(settings)
        run.train(0, SAVED)
        run.accelerator.save_state(f"{folder}/{name}")
        run.train(SAVED, STEPS)
        found[name] = run.found()
        release(run.accelerator)
    return {**found, **resume_all(cases, folder)}


def resume_all(cases: dict[str, Any], folder: str) -> dict[str, Any]:
    found = {}
    for name, settings in cases.items():
        run = Run(settings, f"{folder}/{name}")
        run.train(SAVED, STEPS)
        found[f"{name}, resumed"] = run.found()
        release(run.accelerator)
    return found


def check(found: dict[str, Any], tolerance: float = 1e-6) -> None:
    plain = expected()
    for name, result in found.items():
        for kind in ("average", "weights"):
            assert set(result[kind]) == set(plain[kind]), name
            for key, value in plain[kind].items():
                torch.testing.assert_close(
                    result[kind][key], value, atol=tolerance, rtol=0, msg=f"{name}, {kind}: {key}"
                )
        assert result["loss"] == pytest.approx(plain["loss"], abs=tolerance), name


def test_averages_equal_those_of_one_process(tmp_path: Path) -> None:
    found = run_world(train_all, 2, CASES, str(tmp_path), timeout=400)[0]
    assert len(found) == 2 * len(CASES)
    check(found)
    for ranks, name in ((1, "stage 2"), (3, "stage 3")):
        check(run_world(resume_all, ranks, {name: CASES[name]}, str(tmp_path), timeout=200)[0])


HALF: dict[str, dict[str, Any]] = {
    **{f"stage {stage}": config(stage) for stage in (1, 2, 3)},
    "stage 3 offloaded": offloading(3),
}


def follow(cases: dict[str, Any], folder: str) -> dict[str, Any]:
    """Averages in bf16, and averages of the master weights that DeepSpeed gathers after each step."""
    from deepspeed.utils import safe_get_full_fp32_param
    from safetensors.torch import load_file

    found = {}
    for name, settings in cases.items():
        accelerator = accelerator_of(settings, mixed_precision="bf16")
        model = net()
        loader = DataLoader(data(), batch_size=BATCH)
        model, optimizer, _ = accelerator.prepare(model, optimizer_of(model), loader)
        average, masters = accelerator.moving_average(model, DECAY, use_buffers=True), {}
        for step, (x, y) in enumerate(batches()[:STEPS]):
            model.module.scale.fill_(1 + step / 8)
            accelerator.backward(loss_of(model, x, y))
            optimizer.step()
            assert average.update()
            for key, parameter in model.module.named_parameters():
                value = safe_get_full_fp32_param(parameter)
                masters[key] = masters[key].lerp(value, 1 - DECAY) if step else value.clone()
        trained = weights_of(accelerator.get_state_dict(model))
        with average.applied():
            applied = weights_of(accelerator.get_state_dict(model))
            accelerator.save_state(f"{folder}/{name}")
        restored = weights_of(accelerator.get_state_dict(model))
        average.copy_to_model()
        copied = weights_of(accelerator.get_state_dict(model))
        if accelerator.is_main_process:
            saved = load_file(f"{folder}/{name}/moving_average.safetensors")
            found[name] = (masters, saved, applied, copied, trained, restored)
        average.averages.clear()
        accelerator.load_state(f"{folder}/{name}")
        loaded = [average.averages[key] for key in average.parts()]
        average.copy_to_model()
        assert len(loaded) > 1 and copied.keys() == weights_of(accelerator.get_state_dict(model)).keys()
        for key, value in weights_of(accelerator.get_state_dict(model)).items():
            assert torch.equal(value, copied[key]), key
        release(accelerator)
    return found


def test_averages_in_bf16_are_those_of_the_master_weights(tmp_path: Path) -> None:
    found = run_world(follow, 2, HALF, str(tmp_path), timeout=400)[0]
    assert set(found) == set(HALF)
    for name, (masters, saved, applied, copied, trained, restored) in found.items():
        assert saved.keys() - masters.keys() == {"scale"}
        for key, value in masters.items():
            torch.testing.assert_close(saved[key], value, atol=1e-6, rtol=0, msg=f"{name}: {key}")
            assert saved[key].dtype == torch.float32
            assert torch.equal(applied[key], saved[key].bfloat16().float()), (name, key)
            assert torch.equal(copied[key], applied[key]) and not torch.equal(applied[key], trained[key])
        assert applied["scale"].item() == copied["scale"].item() != trained["scale"].item()
        assert all(torch.equal(restored[key], value) for key, value in trained.items()), name


def refuse(settings: dict[str, Any], with_optimizer: bool, precision: str) -> str:
    accelerator = accelerator_of(settings, mixed_precision=precision)
    model = net()
    loader = DataLoader(data(), batch_size=BATCH)
    model, *_ = accelerator.prepare(model, loader, *([optimizer_of(model)] if with_optimizer else []))
    with pytest.raises(ConfigurationError) as caught:
        accelerator.moving_average(model)
    return str(caught.value)


def test_engines_that_were_not_compared_are_refused() -> None:
    assert "Net was prepared without an optimizer" in run_world(refuse, 2, config(3), False, "no")[0]
    other = config(1, data_types={"grad_accum_dtype": "fp32"})
    assert (
        "not been compared with one process for DeepSpeed's BF16_Optimizer"
        in run_world(refuse, 2, other, True, "bf16")[0]
    )

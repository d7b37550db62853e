"""Several engines: joint losses, models that are not trained, several plugins; DummyOptim and DummyScheduler."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from deepspeed_runs import (
    BATCH,
    MISSING,
    TOLERANCE,
    accelerator_of,
    adamw,
    config,
    data,
    groups,
    loss_of,
    net,
    plain,
    release,
    weights_of,
)
from torch import nn
from torch.utils.data import DataLoader

from accel_state.errors import ConfigurationError
from accel_state.testing import run_world

pytestmark = [pytest.mark.skipif(bool(MISSING), reason=MISSING or "deepspeed is installed"), pytest.mark.timeout(600)]
FEW = 6


def batches(accelerator: Any, steps: int = FEW) -> DataLoader:
    return DataLoader(data(steps), batch_size=BATCH // accelerator.num_processes)


def train(accelerator: Any, model: Any, opt: Any, loader: Any) -> dict[str, torch.Tensor]:
    for x, y in loader:
        accelerator.backward(loss_of(model, x, y))
        opt.step()
    weights = weights_of(accelerator.get_state_dict(model))
    release(accelerator)
    return weights


def assert_near(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert max((found[name] - value).abs().max().item() for name, value in expected.items()) < TOLERANCE


def agreement(one: nn.Module, two: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return loss_of(one, x, y) + loss_of(two, x, y) + (one(x) - two(x)).square().mean()


def joint(stages: tuple[int, int], clip: float) -> dict[str, Any]:
    """Two models with one loss; every second step uses the first model only."""
    accelerator = accelerator_of(config(stages[0]))
    first = net()
    first, first_opt, loader = accelerator.prepare(first, adamw(groups(first)), batches(accelerator))
    accelerator.deepspeed_plugin.deepspeed_config["zero_optimization"]["stage"] = stages[1]
    second = net(seed=1)
    second, second_opt = accelerator.prepare(second, adamw(groups(second)))
    norms = []
    for index, (x, y) in enumerate(loader):
        loss = agreement(first, second, x, y) if index % 2 == 0 else loss_of(first, x, y)
        accelerator.backward(loss)
        norms.append(
            accelerator.clip_grad_norm_([*first.parameters(), *second.parameters()], clip).item()
            if index % 2 == 0
            else 0.0
        )
        for opt in (first_opt, second_opt):
            opt.step()
            opt.zero_grad()
    steps = first_opt.steps_taken, second_opt.steps_taken
    weights = [weights_of(accelerator.get_state_dict(model)) for model in (first, second)]
    del first, second, first_opt, second_opt
    release(accelerator)
    return {"norms": norms, "steps": steps, "weights": weights}


def plain_joint(clip: float) -> dict[str, Any]:
    first, second = net(), net(seed=1)
    opts = adamw(groups(first)), adamw(groups(second))
    norms = []
    for index, (x, y) in enumerate(DataLoader(data(FEW), batch_size=BATCH)):
        both = index % 2 == 0
        (agreement(first, second, x, y) if both else loss_of(first, x, y)).backward()
        norms.append(
            nn.utils.clip_grad_norm_([*first.parameters(), *second.parameters()], clip).item() if both else 0.0
        )
        for opt in opts[: 2 if both else 1]:
            opt.step()
            opt.zero_grad()
    return {"norms": norms, "weights": [weights_of(first), weights_of(second)]}


def run_joint() -> dict[str, Any]:
    return {str(stages): joint(stages, 0.5) for stages in ((0, 0), (1, 1), (2, 2), (3, 3), (3, 1))}


@pytest.mark.slow  # starts DeepSpeed's engines in pairs; test_windows trains with one in the fast tier
def test_a_loss_of_two_models() -> None:
    found = run_world(run_joint, 2, timeout=500)[0]
    expected = plain_joint(0.5)
    for stages, result in found.items():
        assert result["steps"] == (FEW, FEW // 2), stages
        assert result["norms"] == pytest.approx(expected["norms"], abs=TOLERANCE), stages
        for own, wanted in zip(result["weights"], expected["weights"], strict=True):
            assert_near(own, wanted)


def dictionary() -> dict[str, Any]:
    """A student at stage 2 and a frozen, sharded teacher at stage 3, each prepared with its plugin."""
    from accel import Accelerator
    from accel.deepspeed.plugin import DeepSpeedPlugin

    plugins = {"student": DeepSpeedPlugin(hf_ds_config=config(2)), "teacher": DeepSpeedPlugin(hf_ds_config=config(3))}
    accelerator = Accelerator(deepspeed_plugins=plugins)
    facts: dict[str, Any] = {
        "first": accelerator.deepspeed_plugin is plugins["student"],
        "type": str(accelerator.distributed_type),
    }
    student = net()
    student, opt, loader = accelerator.prepare(student, adamw(groups(student)), batches(accelerator))
    accelerator.state.select_deepspeed_plugin("teacher")
    facts["second"] = accelerator.deepspeed_plugin is plugins["teacher"]
    teacher = accelerator.prepare(net(seed=1))
    teacher.eval()
    facts["divided"] = [parameter.numel() for parameter in teacher.parameters()]
    facts["stages"] = student.zero_optimization_stage(), teacher.zero_optimization_stage()
    facts["unwrapped"] = (
        type(accelerator.unwrap_model(student)).__name__,
        type(accelerator.unwrap_model(teacher)).__name__,
    )
    gathered = []
    for x, y in loader:
        with torch.no_grad():
            wanted = teacher(x)
        accelerator.backward(loss_of(student, x, y) + (student(x) - wanted).square().mean())
        opt.step()
        opt.zero_grad()
        gathered.append(accelerator.gather_for_metrics(wanted))
    facts["outputs"] = torch.cat(gathered)
    facts["weights"] = weights_of(accelerator.get_state_dict(student))
    facts["teacher"] = weights_of(accelerator.get_state_dict(teacher))
    second = Accelerator()
    facts["shared"] = second.deepspeed_plugin is plugins["teacher"] and str(second.distributed_type)
    with pytest.raises(ConfigurationError, match="'judge'.*DeepSpeed"):
        second.state.select_deepspeed_plugin("judge")
    second.free_memory()
    release(accelerator)
    return facts


def test_student_and_sharded_teacher() -> None:
    found = run_world(dictionary, 2, timeout=500)[0]
    student, teacher = net(), net(seed=1)
    opt = adamw(groups(student))
    outputs = []
    for x, y in DataLoader(data(FEW), batch_size=BATCH):
        with torch.no_grad():
            outputs.append(teacher(x))
        (loss_of(student, x, y) + (student(x) - outputs[-1]).square().mean()).backward()
        opt.step()
        opt.zero_grad()
    assert found["first"] and found["second"] and found["shared"] == "DEEPSPEED" == found["type"]
    assert found["stages"] == (2, 3) and found["unwrapped"] == ("Net", "Net")
    # Outside of its forward, a rank holds its part of each parameter only.
    assert set(found["divided"]) == {0}
    torch.testing.assert_close(found["outputs"], torch.cat(outputs), atol=TOLERANCE, rtol=0)
    assert_near(found["weights"], student.state_dict())
    assert_near(found["teacher"], teacher.state_dict())


def stand_ins() -> dict[str, Any]:
    """A configured optimizer and scheduler; a scheduler from a callable; and a model without either."""
    from accel.deepspeed.engine import DeepSpeedOptimizerWrapper, DeepSpeedSchedulerWrapper
    from accel.deepspeed.optimizer import DummyOptim, DummyScheduler

    found: dict[str, Any] = {}
    optimizer = {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto", "torch_adam": True}}
    linear = {"warmup_min_lr": 0.0, "warmup_max_lr": "auto", "warmup_num_steps": "auto", "warmup_type": "linear"}
    settings = {**config(2), "optimizer": optimizer, "scheduler": {"type": "WarmupLR", "params": linear}}
    accelerator = accelerator_of(settings)
    model = net()
    dummy = DummyOptim(groups(model), lr=1e-2, weight_decay=0.1)
    schedule = DummyScheduler(dummy, warmup_num_steps=4 * accelerator.num_processes)
    schedule, loader, dummy, model = accelerator.prepare(schedule, batches(accelerator), dummy, model)
    found["types"] = isinstance(dummy, DeepSpeedOptimizerWrapper), isinstance(schedule, DeepSpeedSchedulerWrapper)
    rates = []
    for x, y in loader:
        accelerator.backward(loss_of(model, x, y))
        dummy.step()
        schedule.step()
        dummy.zero_grad()
        rates.append(schedule.get_last_lr())
    found["rates"] = rates
    found["weights"] = weights_of(accelerator.get_state_dict(model))
    release(accelerator)

    accelerator = accelerator_of({**config(2), "optimizer": optimizer})
    model = net()
    dummy = DummyOptim(model.parameters(), lr=1e-2, weight_decay=0.1)
    step = DummyScheduler(
        dummy,
        lr_scheduler_callable=lambda opt: torch.optim.lr_scheduler.StepLR(opt, 2 * accelerator.num_processes, 0.5),
    )
    model, dummy, step, loader = accelerator.prepare(model, dummy, step, batches(accelerator))
    rates = []
    for x, y in loader:
        accelerator.backward(loss_of(model, x, y))
        dummy.step()
        step.step()
        rates.append(dummy.param_groups[0]["lr"])
    found["called"] = rates
    release(accelerator)

    accelerator = accelerator_of(config(2))
    model, loader = accelerator.prepare(net(), batches(accelerator))
    with torch.no_grad():
        found["inference"] = torch.cat([accelerator.gather_for_metrics(model(x)) for x, _ in loader])
    release(accelerator)
    return found


@pytest.mark.slow  # starts DeepSpeed's engine once more; test_windows is in the fast tier
def test_dummies() -> None:
    found = run_world(stand_ins, 2, timeout=500)[0]
    assert found["types"] == (True, True)
    # DeepSpeed's first rate is that before the warm-up, and its second too.
    assert [rates[0] for rates in found["rates"]] == pytest.approx([0.0, 0.0025, 0.005, 0.0075, 0.01, 0.01])
    model = net()
    opt = adamw(groups(model))
    for (x, y), rates in zip(DataLoader(data(FEW), batch_size=BATCH), [[0.0, 0.0], *found["rates"]], strict=False):
        for group, rate in zip(opt.param_groups, rates, strict=True):
            group["lr"] = rate
        loss_of(model, x, y).backward()
        opt.step()
        opt.zero_grad()
    assert_near(found["weights"], model.state_dict())
    assert found["called"] == pytest.approx([0.01, 0.005, 0.005, 0.0025, 0.0025, 0.00125])
    model = net()
    torch.testing.assert_close(found["inference"], model(data(FEW).tensors[0]).detach(), atol=1e-5, rtol=0)


class Experts(nn.Module):
    """Routes each sample to one of two experts, so ranks may run different ones."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(13, 13) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = (x.detach().sum(dim=1) > 0).long()
        # Every expert runs, so that each has a gradient.
        return torch.stack([expert(x) * (chosen == index)[:, None] for index, expert in enumerate(self.experts)]).sum(
            dim=0
        )


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 13)
        self.middle = Experts()
        self.last = nn.Linear(13, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.middle(self.first(x).relu()))


def mixture() -> dict[str, Any]:
    """A leaf module of experts, and a model created with deepspeed.zero.Init."""
    from accel.deepspeed.plugin import DeepSpeedPlugin

    accelerator = accelerator_of(DeepSpeedPlugin(hf_ds_config=config(3), transformer_moe_cls_names=" Experts ,"))
    import deepspeed

    model = Mixture()
    with pytest.raises(ConfigurationError, match="Expert.*Experts, Linear, Mixture"):
        DeepSpeedPlugin(zero_stage=3, transformer_moe_cls_names="Expert").set_moe_leaf_modules(model)
    model, opt, loader = accelerator.prepare(model, adamw(model.parameters()), batches(accelerator))
    leaves = [type(module).__name__ for module in deepspeed.utils.get_z3_leaf_modules(model)]
    weights = train(accelerator, model, opt, loader)

    accelerator = accelerator_of({**config(3), "train_micro_batch_size_per_gpu": BATCH // accelerator.num_processes})
    with deepspeed.zero.Init(
        config_dict_or_path={**config(3), "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}
    ):
        created = net()
    held = sum(parameter.numel() for parameter in created.parameters())
    created, opt, loader = accelerator.prepare(created, adamw(groups(created)), batches(accelerator))
    initialised = train(accelerator, created, opt, loader)
    return {"leaves": leaves, "weights": weights, "held": held, "created": initialised}


def test_expert_layers_and_models_created_sharded() -> None:
    found = run_world(mixture, 2, timeout=500)[0]
    model = Mixture()
    opt = adamw(model.parameters())
    for x, y in DataLoader(data(FEW), batch_size=BATCH):
        loss_of(model, x, y).backward()
        opt.step()
        opt.zero_grad()
    assert found["leaves"] == ["Experts"]
    assert_near(found["weights"], model.state_dict())
    assert found["held"] == 0
    assert_near(found["created"], plain(steps=FEW)["weights"])


def change_gathered() -> None:
    accelerator = accelerator_of(config(3))
    model = net()
    model, *_ = accelerator.prepare(model, adamw(groups(model)), batches(accelerator))
    with (
        pytest.raises(ConfigurationError, match=r"^first\.weight was changed inside gathered_parameters"),
        torch.no_grad(),
        accelerator.gathered_parameters(model),
    ):
        for parameter in model.parameters():
            parameter.data.mul_(2)
    release(accelerator)


def test_gathered_weights_are_not_changed_through_their_data() -> None:
    """DeepSpeed would drop the change without an error."""
    run_world(change_gathered, 2)

"""Training loops against plain PyTorch: same data, same seed, same numbers."""

from __future__ import annotations

import copy
import pickle
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel import (
    Accelerator,
    AutocastKwargs,
    DataLoaderConfiguration,
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    LocalSGD,
)
from accel.optimizer import AcceleratedOptimizer
from accel.strategies.ddp import DistributedDataParallel
from accel_state import AcceleratorState, ConfigurationError
from accel_state.env import patch_environment
from accel_state.testing import run_world


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 16)
        self.second = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.second(torch.relu(self.first(x)))
        return {"logits": logits, "guess": logits.argmax(-1)}


def build(seed: int = 0) -> Network:
    torch.manual_seed(seed)
    return Network()


def data(length: int = 64) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(length, 6, generator=generator)
    return TensorDataset(x, x[:, :3].argmax(-1))


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten().clone() for p in model.parameters()])


def plain_loop(
    batch: int = 16, epochs: int = 2, clip: float | None = None, autocast: torch.dtype | None = None
) -> tuple[torch.Tensor, list[float]]:
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)
    norms = []
    for _ in range(epochs):
        for x, y in DataLoader(data(), batch_size=batch):
            with torch.autocast("cpu", dtype=autocast or torch.bfloat16, enabled=autocast is not None):
                logits = model(x)["logits"].float()
            loss = nn.functional.cross_entropy(logits, y)
            optimizer.zero_grad()
            loss.backward()
            if clip is not None:
                norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), clip)))
            optimizer.step()
            scheduler.step()
    return weights(model), norms


def accelerated_loop(
    accelerator: Accelerator,
    batch: int = 16,
    epochs: int = 2,
    clip: float | None = None,
    order: str = "mols",
    build_model: Any = build,
) -> tuple[nn.Module, list[float]]:
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    objects = {
        "m": model,
        "o": optimizer,
        "l": DataLoader(data(), batch_size=batch),
        "s": torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5),
    }
    prepared = dict(zip(order, accelerator.prepare(*(objects[key] for key in order)), strict=True))
    model, optimizer, loader, scheduler = (prepared[key] for key in "mols")
    norms = []
    for _ in range(epochs):
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(x)["logits"], y)
                accelerator.backward(loss)
                if clip is not None:
                    norms.append(float(accelerator.clip_grad_norm_(model.parameters(), clip)))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    return model, norms


@pytest.mark.parametrize("order", ["mols", "slom", "olms"])
def test_one_process_trains_bitwise_like_plain_pytorch(order: str) -> None:
    model, _ = accelerated_loop(Accelerator(cpu=True), order=order)
    assert torch.equal(weights(model), plain_loop()[0])


def global_batches() -> DataLoaderConfiguration:
    return DataLoaderConfiguration(split_batches=True)


def train_through_reduced_losses(reduction: str) -> torch.Tensor:
    """Two steps of SGD on the loss of all ranks together, which `reduce` gives to each."""
    accelerator = Accelerator(cpu=True)
    model = build()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(2):
        x, labels = data()[32 * step + accelerator.process_index :: accelerator.num_processes]
        x, labels = x[: 16 // accelerator.num_processes], labels[: 16 // accelerator.num_processes]
        loss = nn.functional.cross_entropy(model(x)["logits"], labels, reduction=reduction)
        loss = accelerator.reduce(loss, reduction)  # type: ignore[arg-type]
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def train_through_both() -> list[torch.Tensor]:
    return [train_through_reduced_losses(reduction) for reduction in ("mean", "sum")]


def test_gradients_through_reduce_are_those_of_one_process() -> None:
    alone = train_through_both()
    for found in run_world(train_through_both, 2):
        torch.testing.assert_close(found, alone, rtol=1e-5, atol=1e-6)


def train_on_ranks(clip: float | None) -> list[float]:
    accelerator = Accelerator(cpu=True, dataloader_config=global_batches())
    model, norms = accelerated_loop(accelerator, clip=clip)
    expected, expected_norms = plain_loop(clip=clip)
    assert torch.allclose(weights(model), expected, atol=1e-6), (weights(model) - expected).abs().max()
    assert norms == pytest.approx(expected_norms, rel=1e-5)
    everyone = accelerator.gather(weights(model)[None])
    assert (everyone == everyone[0]).all(), "the ranks' weights differ"
    return norms


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_train_like_one_process(world: int) -> None:
    run_world(train_on_ranks, world, 0.5)


def test_clipping_in_one_process_equals_plain_pytorch() -> None:
    model, norms = accelerated_loop(Accelerator(cpu=True), clip=0.5)
    expected, expected_norms = plain_loop(clip=0.5)
    assert torch.equal(weights(model), expected) and norms == expected_norms


def test_clipping_while_gradients_accumulate_only_measures() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = accelerator.prepare(build())
    x, y = data(4)[:]
    with accelerator.accumulate(model):
        accelerator.backward(nn.functional.cross_entropy(model(x)["logits"], y))
        before = model.first.weight.grad.clone()
        norm = accelerator.clip_grad_norm_(model.parameters(), 1e-3)
        accelerator.clip_grad_value_(model.parameters(), 1e-9)
        assert norm > 1e-3 and torch.equal(model.first.weight.grad, before)
    with accelerator.accumulate(model):
        accelerator.backward(nn.functional.cross_entropy(model(x)["logits"], y))
        accelerator.clip_grad_value_(model.parameters(), 1e-4)
        assert model.first.weight.grad.abs().max() <= 1e-4


# -- mixed precision
# ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", torch.bfloat16)])
def test_mixed_precision_equals_autocast(precision: str, dtype: torch.dtype) -> None:
    model, _ = accelerated_loop(Accelerator(cpu=True, mixed_precision=precision))
    assert torch.equal(weights(model), plain_loop(autocast=dtype)[0])


def test_outputs_are_float32_unless_asked_otherwise() -> None:
    x = torch.randn(2, 6)
    model = Accelerator(cpu=True, mixed_precision="bf16").prepare(build())
    out = model(x)
    assert out["logits"].dtype == torch.float32 and out["guess"].dtype == torch.int64
    AcceleratorState._reset_state()
    kept = Accelerator(
        cpu=True, mixed_precision="bf16", kwargs_handlers=[AutocastKwargs(outputs_to_fp32=False)]
    ).prepare(build())
    assert kept(x)["logits"].dtype == torch.bfloat16 and torch.equal(kept(x)["logits"].float(), out["logits"])


def test_autocast_block() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    a = torch.randn(4, 4, device=accelerator.device)
    with accelerator.autocast():
        assert (a @ a).dtype == torch.bfloat16
    with accelerator.autocast(AutocastKwargs(enabled=False)):
        assert (a @ a).dtype == torch.float32
    AcceleratorState._reset_state()
    with Accelerator(cpu=True).autocast():
        assert (a @ a).dtype == torch.float32


def test_the_autocast_forward_survives_copies_pickles_and_unwrapping() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model = accelerator.prepare(build())
    duplicate = copy.deepcopy(model)
    with torch.no_grad():
        duplicate.second.weight.zero_()
        duplicate.second.bias.fill_(2)
    x = torch.randn(2, 6)
    assert (duplicate(x)["logits"] == 2).all() and not (model(x)["logits"] == 2).any()
    assert torch.equal(pickle.loads(pickle.dumps(model))(x)["logits"], model(x)["logits"])
    raw = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    assert "forward" not in vars(raw) and torch.equal(raw(x)["logits"], build()(x)["logits"])


def test_fp16_scales_losses_and_skips_overflowing_steps() -> None:
    handler = GradScalerKwargs(init_scale=1024.0, growth_interval=100)
    accelerator = Accelerator(cpu=True, mixed_precision="fp16", kwargs_handlers=[handler])
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    x, y = data(8)[:]

    accelerator.backward(nn.functional.cross_entropy(model(x)["logits"], y))
    accelerator.unscale_gradients()
    accelerator.unscale_gradients()  # a second time does nothing
    unscaled = model.first.weight.grad.clone()
    norm = accelerator.clip_grad_norm_(model.parameters(), 1e9)
    assert torch.equal(model.first.weight.grad, unscaled) and norm < 100
    reference = build()
    with torch.autocast("cpu", dtype=torch.float16):
        logits = reference(x)["logits"]
    nn.functional.cross_entropy(logits.float(), y).backward()
    assert torch.allclose(unscaled, reference.first.weight.grad, rtol=2e-2, atol=1e-3)
    optimizer.step()
    scheduler.step()
    assert not accelerator.optimizer_step_was_skipped and scheduler.get_last_lr() == [0.05]
    assert accelerator.scaler is not None and accelerator.scaler.get_scale() == 1024

    optimizer.zero_grad()
    before = weights(model)
    accelerator.backward(nn.functional.cross_entropy(model(x)["logits"], y) * float("inf"))
    optimizer.step()
    scheduler.step()
    assert accelerator.optimizer_step_was_skipped and optimizer.step_was_skipped
    assert scheduler.get_last_lr() == [0.05] and accelerator.scaler.get_scale() == 512
    assert torch.equal(weights(model), before)


def test_two_optimizers_share_one_loss_scale() -> None:
    """Each optimizer's gradients are unscaled exactly once, and the scale is updated once both have stepped."""
    accelerator = Accelerator(cpu=True, mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=2.0**16)])
    a, b = build(0), build(1)
    a, b, first, second = accelerator.prepare(
        a, b, torch.optim.SGD(a.parameters(), lr=1), torch.optim.SGD(b.parameters(), lr=1)
    )
    x, y = data(8)[:]
    before = weights(b)
    loss = nn.functional.cross_entropy(a(x)["logits"], y) + nn.functional.cross_entropy(b(x)["logits"], y)
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(b.parameters(), 1e9)
    first.step()
    second.step()
    plain = build(1)
    nn.functional.cross_entropy(plain(x)["logits"], y).backward()
    moved = before - weights(b)
    assert torch.allclose(moved, torch.cat([p.grad.flatten() for p in plain.parameters()]), rtol=5e-2, atol=2e-3)
    first.zero_grad(), second.zero_grad()
    accelerator.backward(nn.functional.cross_entropy(a(x)["logits"], y) * float("inf"))
    first.step()
    second.step()  # without gradients
    assert first.step_was_skipped
    accelerator.backward(nn.functional.cross_entropy(a(x)["logits"], y))
    assert accelerator.scaler is not None and accelerator.scaler.get_scale() == 2.0**15


def test_precision_that_is_not_known_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="'fp61' is not a PrecisionType"):
        Accelerator(cpu=True, mixed_precision="fp61")


# -- schedulers
# -----------------------------------------------------------------------------------------------------------


def schedule(split: bool, with_optimizer: bool) -> list[float]:
    accelerator = Accelerator(
        cpu=True,
        dataloader_config=DataLoaderConfiguration(split_batches=split),
        step_scheduler_with_optimizer=with_optimizer,
        gradient_accumulation_steps=2,
    )
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    total = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=8)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, total)
    rates = []
    for _ in range(4):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(2, 6))["logits"].sum())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            rates.append(scheduler.get_last_lr()[0])
    return rates


def schedules() -> list[list[float]]:
    return [schedule(*settings) for settings in ((False, True), (True, True), (False, False))]


def test_schedules_advance_as_documented() -> None:
    of_both, split, by_hand = run_world(schedules, 2)[0]
    assert of_both == pytest.approx([1.0, 0.75, 0.75, 0.5])  # two steps for two processes
    assert split == schedule(False, True) == pytest.approx([1.0, 0.875, 0.875, 0.75])
    assert by_hand == pytest.approx([0.875, 0.75, 0.625, 0.5])


# -- objects
# --------------------------------------------------------------------------------------------------------------


def test_prepared_optimizers_are_optimizers_all_through() -> None:
    accelerator = Accelerator(cpu=True)
    model = build()
    raw = torch.optim.AdamW(model.parameters(), lr=0.1)
    optimizer = accelerator.prepare(raw)
    assert isinstance(optimizer, AcceleratedOptimizer) and isinstance(optimizer, torch.optim.Optimizer)
    assert (
        optimizer.param_groups is raw.param_groups
        and optimizer.state is raw.state
        and optimizer.defaults is raw.defaults
    )
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    assert len(raw.param_groups) == 2
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    model(torch.ones(1, 6))["logits"].sum().backward()
    assert optimizer.step(lambda: torch.tensor(7.0)) == 7.0 and calls == [1]
    state = optimizer.state_dict()
    optimizer.load_state_dict(state)
    copied = pickle.loads(pickle.dumps(optimizer))
    assert copied.param_groups[0]["lr"] == 0.1 and copied.gradient_state.sync_gradients
    optimizer.train(), optimizer.eval()  # nothing to switch for AdamW
    optimizer.zero_grad(set_to_none=False)
    assert (model.first.weight.grad == 0).all()


def test_two_accelerators_in_sequence() -> None:
    first = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=3)
    with pytest.raises(ConfigurationError, match="this process already has an Accelerator"):
        Accelerator(cpu=True, mixed_precision="fp16")
    second = Accelerator(cpu=True)
    assert second.mixed_precision == "bf16" and (
        first.gradient_accumulation_steps,
        second.gradient_accumulation_steps,
    ) == (3, 1)
    first.end_training()
    assert Accelerator(cpu=True, mixed_precision="fp16").mixed_precision == "fp16"


def test_settings_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="holds two AutocastKwargs"):
        Accelerator(cpu=True, kwargs_handlers=[AutocastKwargs(), AutocastKwargs()])
    with pytest.raises(ConfigurationError, match="a dict, which is not a KwargsHandler"):
        Accelerator(cpu=True, kwargs_handlers=[{}])  # type: ignore[list-item]
    with pytest.raises(ConfigurationError, match="contradicts dataloader_config"):
        Accelerator(cpu=True, split_batches=True, dataloader_config=DataLoaderConfiguration())
    assert Accelerator(cpu=True, split_batches=True).split_batches
    with pytest.raises(ConfigurationError, match="must be a FullyShardedDataParallelPlugin"):
        Accelerator(cpu=True, fsdp_plugin=object())
    with patch_environment(ACCELERATE_USE_CPU="1"):
        assert Accelerator().device.type == "cpu"


# -- data parallelism
# -----------------------------------------------------------------------------------------------------


def with_hook(hook: str, wrapper: str, options: dict[str, Any]) -> torch.Tensor:
    handler = DistributedDataParallelKwargs(
        comm_hook=hook, comm_wrapper=wrapper, comm_state_option=options, bucket_cap_mb=3
    )  # type: ignore[arg-type]
    accelerator = Accelerator(cpu=True, kwargs_handlers=[handler], dataloader_config=global_batches())
    model, _ = accelerated_loop(accelerator)
    return weights(model)


@pytest.mark.parametrize(
    ("hook", "wrapper", "options", "tolerance"),
    [
        ("fp16", "no", {}, 5e-3),
        ("bf16", "no", {}, 2e-2),
        ("no", "bf16", {}, 2e-2),
        ("power_sgd", "fp16", {"matrix_approximation_rank": 2, "start_powerSGD_iter": 2}, 0.5),
        ("batched_power_sgd", "no", {"matrix_approximation_rank": 2, "start_powerSGD_iter": 2}, 0.5),
    ],
)
def test_communication_hooks_compress_and_still_train(
    hook: str, wrapper: str, options: dict[str, Any], tolerance: float
) -> None:
    first, second = run_world(with_hook, 2, hook, wrapper, options)
    exact = plain_loop()[0]
    assert torch.equal(first, second), "the ranks' weights differ"
    assert not torch.equal(first, exact), "nothing was compressed"
    assert (first.cpu() - exact).abs().max() < tolerance


def test_hooks_are_checked(caplog: pytest.LogCaptureFixture) -> None:
    assert DistributedDataParallelKwargs(comm_hook="FP16").comm_hook is DDPCommunicationHookType.FP16  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="not a DDPCommunicationHookType"):
        DistributedDataParallelKwargs(comm_hook="zip")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="comm_wrapper='power_sgd'.*fp16, bf16"):
        DistributedDataParallelKwargs(comm_wrapper="power_sgd")  # type: ignore[arg-type]
    options = DistributedDataParallelKwargs(comm_state_option={"a": 1})  # type: ignore[arg-type]
    options.register_comm_hook(None)  # type: ignore[arg-type]
    assert "comm_state_option={'a': 1} has no effect with comm_hook='no'" in caplog.text


def local_sgd(steps: int) -> tuple[list[bool], torch.Tensor]:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = build()
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(data(), batch_size=4)
    )
    equal = []
    with LocalSGD(accelerator, model, local_sgd_steps=steps) as local:
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.cross_entropy(model(x)["logits"], y))
                optimizer.step()
                optimizer.zero_grad()
                local.step()
            if accelerator.sync_gradients:
                everyone = accelerator.gather(weights(model)[None])
                equal.append(bool((everyone == everyone[0]).all()))
    return equal, weights(model)


def plain_local_sgd(steps: int, world: int) -> torch.Tensor:
    models = [build() for _ in range(world)]
    batches = [data()[i : i + 4] for i in range(0, 64, 4)]
    rank_batches = [batches[r::world] for r in range(world)]
    for step in range(4):
        for model, own in zip(models, rank_batches, strict=True):
            model.zero_grad()
            for x, y in own[2 * step : 2 * step + 2]:
                (nn.functional.cross_entropy(model(x)["logits"], y) / 2).backward()
            with torch.no_grad():
                for p in model.parameters():
                    p -= 0.1 * p.grad
        if (step + 1) % steps == 0 or step == 3:
            mean = torch.stack([weights(m) for m in models]).mean(0)
            for model in models:
                nn.utils.vector_to_parameters(mean.clone(), model.parameters())
    return weights(models[0])


def test_local_sgd_averages_every_few_optimizer_steps() -> None:
    (equal, first), (_, second) = run_world(local_sgd, 2, 3)
    assert equal == [False, False, True, False]  # and once more when the block ends
    assert torch.equal(first, second) and torch.allclose(first, plain_local_sgd(3, 2), atol=1e-6)
    with pytest.raises(ConfigurationError, match="local_sgd_steps=0"):
        LocalSGD(Accelerator(cpu=True), build(), 0)


def triggers() -> list[bool]:
    accelerator = Accelerator(cpu=True, kwargs_handlers=[InitProcessGroupKwargs()])
    seen = [accelerator.check_trigger()]
    if accelerator.is_last_process:
        accelerator.set_trigger()
    return [*seen, accelerator.check_trigger(), accelerator.check_breakpoint()]


def test_one_ranks_trigger_is_seen_by_all() -> None:
    assert run_world(triggers, 2) == [[False, True, False]] * 2


def freed_right_after_a_collective(times: int) -> int:
    sys.setswitchinterval(1)  # so that gloo's thread does not get the GIL before the model is freed
    for _ in range(times):
        group = dist.new_group()
        model = DistributedDataParallel(nn.Linear(2, 2), process_group=group)
        dist.destroy_process_group(group)
        group.allreduce_coalesced([torch.ones(1) for _ in range(100)]).wait()  # gloo's thread has the last references
        del group, model
    return times


def test_a_model_that_outlives_its_process_group_is_freed() -> None:
    # Within a few of these the reducer's destructor waited, with the GIL, for a thread that needed the GIL.
    assert run_world(freed_right_after_a_collective, 2, 40, timeout=60) == [40, 40]


def test_a_model_in_half_precision_can_be_exported() -> None:
    x = torch.randn(2, 6)
    model = Accelerator(cpu=True, mixed_precision="bf16").prepare(build()).eval()
    assert model.forward.__name__ == "forward" and model.forward.__wrapped__ is not None
    exported = torch.export.export(model, (x,)).module()
    torch.testing.assert_close(exported(x)["logits"], model(x)["logits"])

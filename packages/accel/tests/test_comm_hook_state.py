"""States of communication hooks in checkpoints: a run that continues is that which was never interrupted."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from accel import Accelerator
from accel.kwargs.ddp import DistributedDataParallelKwargs
from accel_state import context
from accel_state.testing import run_world

STEPS = 6
Average = torch.futures.Future[torch.Tensor]


def average(tensor: torch.Tensor) -> Average:
    future = dist.all_reduce(tensor / dist.get_world_size(), async_op=True).get_future()
    result: Average = future.then(lambda done: done.value()[0])
    return result


def of_bucket(kept: dict[int, torch.Tensor], bucket: Any) -> torch.Tensor:
    """What a hook has kept of a bucket; zeros if there are other buckets now."""
    former = kept.get(bucket.index())
    return torch.zeros_like(bucket.buffer()) if former is None or former.shape != bucket.buffer().shape else former


def with_residuals(state: Any, bucket: Any) -> Average:
    """Send the larger half of the elements, and keep the others for the next step."""
    gradient = bucket.buffer()
    total = gradient + of_bucket(state["residuals"], bucket)
    sent = torch.where(total.abs() >= total.abs().median(), total, torch.zeros_like(total))
    state["residuals"][bucket.index()] = total - sent
    return average(sent)


class Noise:
    """Generators of every kind, a counter, and something that cannot be saved but built again."""

    def __init__(self) -> None:
        self.numpy, self.numpy_new = np.random.RandomState(1), np.random.default_rng(2)
        self.torch, self.python = torch.Generator().manual_seed(3), random.Random(4)
        self.calls, self.group, self.history = 0, dist.group.WORLD, [0.0]


def with_noise(state: Noise, bucket: Any) -> Average:
    noise = state.numpy.normal() + state.numpy_new.normal() + torch.randn((), generator=state.torch).item()
    noise += state.python.gauss(0, 1) + state.history[-1]
    state.calls += 1
    state.history.append(noise / 2)
    return average(bucket.buffer() * (1 + 0.01 * noise * state.calls))


class Smoothed:
    """Has a state_dict of its own."""

    def __init__(self) -> None:
        self.mean: dict[int, torch.Tensor] = {}

    def state_dict(self) -> dict[str, Any]:
        return {"values": list(self.mean.values()), "buckets": list(self.mean)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.mean = dict(zip(state["buckets"], state["values"], strict=True))


def smoothed(state: Smoothed, bucket: Any) -> Average:
    state.mean[bucket.index()] = of_bucket(state.mean, bucket).lerp(bucket.buffer(), 0.5)
    return average(state.mean[bucket.index()].clone())


for hook in (with_residuals, with_noise, smoothed):
    hook.__annotations__.clear()  # DDP compares them with classes, and these are strings


def register(model: Any, name: str) -> None:
    """Register a hook as scripts do that do not use the handler."""
    if name == "residuals":
        model.register_comm_hook({"residuals": {}}, with_residuals)
    elif name == "noise":
        model.register_comm_hook(Noise(), with_noise)
    elif name == "smoothed":
        model.register_comm_hook(Smoothed(), smoothed)
    elif name == "torch":
        model.register_comm_hook(PowerSGDState(None, 2, start_powerSGD_iter=3), powerSGD_hook)
    elif name == "local":
        alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
        model.register_comm_hook(PostLocalSGDState(None, alone, start_localSGD_iter=4), post_localSGD_hook)


POWER: dict[str, Any] = {"start_powerSGD_iter": 2, "matrix_approximation_rank": 1, "min_compression_rate": 0.5}
SMALL = {"bucket_cap_mb": 0.001}
# PowerSGD communicates in callbacks: over gloo, other messages of the same backward pass would get in between.
HOOKS: list[tuple[str, dict[str, Any]]] = [
    ("", {"comm_hook": "power_sgd", "comm_state_option": POWER}),
    ("", {"comm_hook": "power_sgd", "comm_state_option": {**POWER, "warm_start": False}, "comm_wrapper": "fp16"}),
    ("", {"comm_hook": "batched_power_sgd", "comm_state_option": POWER}),
    ("", {"comm_hook": "batched_power_sgd", "comm_state_option": POWER, "gradient_as_bucket_view": True}),
    ("", {"comm_hook": "batched_power_sgd", "comm_state_option": POWER, "static_graph": True}),
    ("residuals", {}),
    ("residuals", {"static_graph": True, **SMALL}),
    ("residuals", {"find_unused_parameters": True, **SMALL}),
    ("noise", SMALL),
    ("smoothed", SMALL),
    ("torch", {}),
    ("local", {}),
]


def run(folder: Path, name: str, options: dict[str, Any], save_at: int | None, resume: bool) -> list[torch.Tensor]:
    """The weights after all steps; the state is saved before step ``save_at``, or loaded."""
    with context.isolated():
        accelerator = Accelerator(cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(**options)])
        torch.manual_seed(9 if resume else 0)
        layers: list[nn.Module] = [layer for _ in range(3) for layer in (nn.Linear(16, 16), nn.Tanh())]
        net = nn.Sequential(*layers, nn.Linear(16, 4))
        model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9))
        register(model, name)
        if resume:
            accelerator.load_state(folder)
        for step in range(save_at or 0 if resume else 0, STEPS):
            if step == save_at and not resume:
                accelerator.save_state(folder)
            x = torch.randn(8, 16, generator=torch.Generator().manual_seed(10 * step + accelerator.process_index))
            accelerator.backward((model(x) - x[:, :4]).pow(2).mean())
            optimizer.step()
            optimizer.zero_grad()
        return [parameter.detach() for parameter in net.parameters()]


def run_all(folder: Path, hooks: list[tuple[str, dict[str, Any]]], moments: list[int]) -> list[str]:
    wrong = []
    for number, (name, options) in enumerate(hooks):
        undisturbed = run(folder, name, options, None, False)
        for save_at in moments:
            place = folder / f"{number}_{save_at}"
            saved = run(place, name, options, save_at, False)
            resumed = run(place, name, options, save_at, True)
            for what, found in (("saved", saved), ("resumed", resumed)):
                difference = max((a - b).abs().max().item() for a, b in zip(found, undisturbed, strict=True))
                if difference:
                    wrong.append(f"{name} {options} {what} at {save_at}: {difference}")
    return wrong


@pytest.mark.parametrize(
    ("hooks", "moments"), [([HOOKS[0], HOOKS[8]], [4]), pytest.param(HOOKS, [1, 2, 4], marks=pytest.mark.slow)]
)
def test_hooks_continue_with_their_states(
    hooks: list[tuple[str, dict[str, Any]]], moments: list[int], tmp_path: Path
) -> None:
    for wrong in run_world(run_all, 2, tmp_path, hooks, moments, timeout=200):
        assert not wrong, "\n".join(wrong)


def changed(folder: Path, rank: int | None) -> list[torch.Tensor]:
    """A run whose hook has other settings than when its state was saved, or none of them was saved."""
    options = {**POWER, "matrix_approximation_rank": rank or 1}
    return run(folder, "", {"comm_hook": "power_sgd", "comm_state_option": options}, 3, rank is not None)


def test_a_hook_with_other_settings_starts_anew(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run_world(changed, 2, tmp_path / "state", None)
    run_world(changed, 2, tmp_path / "state", 2)
    assert "matrix_approximation_rank was 1 when the state was saved, and is 2 now" in capfd.readouterr().err


def test_a_hook_on_other_processes_starts_anew(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run_world(changed, 2, tmp_path / "state", None)
    run_world(changed, 3, tmp_path / "state", 1)
    assert "has no state of it for rank 0 of 3" in capfd.readouterr().err

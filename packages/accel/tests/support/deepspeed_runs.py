"""A small training run, with DeepSpeed and with plain PyTorch, for the DeepSpeed tests."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

MISSING = "" if find_spec("deepspeed") else "deepspeed is not installed: scripts/test tells why"
STEPS, BATCH, WIDTH, CLASSES = 20, 8, 6, 3
STOP = 7  # the number of steps after which prepared runs are saved
# fp32 on several ranks adds the same numbers in another order.
TOLERANCE = 1e-4


class Net(nn.Module):
    """Sizes that are not divisible by the number of ranks, a layer that can be frozen, and a buffer."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(WIDTH, 13)
        self.middle = nn.Linear(13, 13)
        self.last = nn.Linear(13, CLASSES)
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.gelu(self.first(x))
        return self.last(x + functional.gelu(self.middle(x))) * self.scale


def data(steps: int = STEPS) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(STEPS * BATCH, WIDTH, generator=generator)
    y = torch.randint(0, CLASSES, (STEPS * BATCH,), generator=generator)
    return TensorDataset(x[: steps * BATCH], y[: steps * BATCH])


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(model(x).float(), y)


def net(frozen: bool = False, seed: int = 0) -> Net:
    model = Net(seed)
    model.middle.requires_grad_(not frozen)
    return model


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Two parameter groups with different learning rates."""
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    return [
        {"params": [parameter for name, parameter in named if name.startswith("last")], "lr": 2e-2},
        {"params": [parameter for name, parameter in named if not name.startswith("last")]},
    ]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=5e-2, momentum=0.9)


def adagrad(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(parameters, lr=2e-2, lr_decay=0.1, initial_accumulator_value=0.1)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {"adamw": adamw, "sgd": sgd, "adagrad": adagrad}


def plain(
    window: int = 1, clip: float = 0.0, optimizer: str = "adamw", frozen: bool = False, steps: int = STEPS
) -> dict[str, Any]:
    """Train in one process with plain PyTorch; the last accumulation window may be short."""
    model = net(frozen)
    opt = OPTIMIZERS[optimizer](groups(model))
    chunks = list(DataLoader(data(steps), batch_size=BATCH))
    losses, norms = [], []
    for begin in range(0, steps, window):
        chunk = chunks[begin : begin + window]
        for x, y in chunk:
            loss = loss_of(model, x, y)
            (loss / len(chunk)).backward()
            losses.append(loss.item())
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), clip or float("inf")).item())
        opt.step()
        opt.zero_grad()
    return {"losses": losses, "norms": norms, "weights": weights_of(model)}


def weights_of(state: nn.Module | dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    found = state.state_dict() if isinstance(state, nn.Module) else state
    return {name: value.detach().float().clone() for name, value in found.items()}


def config(stage: int, **more: Any) -> dict[str, Any]:
    """A DeepSpeed configuration with "auto" wherever possible."""
    zero = {
        "stage": stage,
        **({"stage3_gather_16bit_weights_on_model_save": True} if stage == 3 else {}),
        **more.pop("zero", {}),
    }
    auto = dict.fromkeys(("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"), "auto")
    return {"zero_optimization": zero, **auto, **more}


def offloading(stage: int) -> dict[str, Any]:
    """Offload optimizer states, and parameters at stage 3, with torch's optimizer."""
    places = {"offload_optimizer": {"device": "cpu"}, **({"offload_param": {"device": "cpu"}} if stage == 3 else {})}
    return config(stage, zero=places, zero_force_ds_cpu_optimizer=False)


def accelerator_of(settings: Any, **arguments: Any) -> Any:
    from accel import Accelerator
    from accel.deepspeed.plugin import DeepSpeedPlugin

    plugin = DeepSpeedPlugin(hf_ds_config=settings) if isinstance(settings, dict) else settings
    return Accelerator(deepspeed_plugin=plugin, **arguments)


def train(
    settings: Any,
    window: int = 1,
    clip: float = 0.0,
    optimizer: str = "adamw",
    frozen: bool = False,
    steps: int = STEPS,
    **arguments: Any,
) -> dict[str, Any]:
    """Train with an Accelerator."""
    accelerator = accelerator_of(settings, gradient_accumulation_steps=window, **arguments)
    model = net(frozen)
    loader = DataLoader(data(steps), batch_size=BATCH // accelerator.num_processes)
    model, opt, loader = accelerator.prepare(model, OPTIMIZERS[optimizer](groups(model)), loader)
    losses, norms = [], []
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = loss_of(model, x, y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norms.append(accelerator.clip_grad_norm_(model.parameters(), clip or 1e9).item())
            opt.step()
            opt.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    found = {
        "losses": losses,
        "norms": norms,
        "weights": weights_of(accelerator.get_state_dict(model)),
        "steps": opt.steps_taken,
    }
    del model, opt, loader
    release(accelerator)
    return found


def prepared(
    stage: int, seed: int = 0, make: Callable[[Any], torch.optim.Optimizer] = adamw, **arguments: Any
) -> tuple[Any, ...]:
    # The schedule moves with each call, so that it does not depend on the number of processes.
    accelerator = accelerator_of(config(stage), step_scheduler_with_optimizer=False, **arguments)
    model = net(frozen=True, seed=seed)
    model.scale.fill_(1.0 + seed)
    optimizer = make(groups(model))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 8, 0.5)
    loader = DataLoader(data(), batch_size=BATCH // accelerator.num_processes)
    return accelerator, *accelerator.prepare(model, optimizer, scheduler, loader)


def loop(parts: tuple[Any, ...], folder: str = "", begin: int = 0) -> list[float]:
    """Train to the end of the epoch; with a folder, save in between, blocking and in the background."""
    accelerator, model, optimizer, scheduler, loader = parts
    losses = []
    for index, (x, y) in enumerate(loader, begin):
        with accelerator.accumulate(model):
            loss = loss_of(model, x, y)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
        if folder and index + 1 == STOP:
            accelerator.save_state(f"{folder}/waiting")
            accelerator.save_state(f"{folder}/beside", blocking=False)
    accelerator.wait_for_save()
    return losses


def release(accelerator: Any) -> None:
    """Reset the state, so that the next Accelerator starts over."""
    accelerator.free_memory()
    accelerator.state._reset_state()
    gc.collect()


def differences(
    found: dict[str, Any], expected: dict[str, Any], names: Iterable[str] = ("losses", "norms")
) -> dict[str, float]:
    """The largest differences of the named values and of the weights."""
    for name in names:
        assert len(found[name]) == len(expected[name]), (name, len(found[name]), len(expected[name]))
    worst = {name: max(abs(a - b) for a, b in zip(found[name], expected[name], strict=True)) for name in names}
    if found["weights"]:
        assert set(found["weights"]) == set(expected["weights"])
        worst["weights"] = max(
            (found["weights"][k] - expected["weights"][k]).abs().max().item() for k in expected["weights"]
        )
    return worst


def check_same(found: dict[str, Any], expected: dict[str, Any], tolerance: float = TOLERANCE) -> None:
    worst = differences(found, expected)
    assert max(worst.values()) < tolerance, worst

"""Training with Muon for hidden matrices and AdamW for the rest, on any strategy and in one process of plain PyTorch.

Torch's Muon orthogonalises in bfloat16, and a gradient whose last bit of float32 differs may round to another number of
bfloat16. In float64 what ranks add in another order rounds to the same ones, so results can be compared.
"""

from __future__ import annotations

from typing import Any

import torch
from expert_runs import build as build_mixture
from mesh_runs import BATCH, batches, build
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader
from windows import plain_windows, train_windows

from accel import Accelerator


def model_of(kind: str, dtype: torch.dtype = torch.float64, seed: int = 0) -> nn.Module:
    if not kind.startswith("moe "):
        return build(kind, seed).to(dtype)
    made: Any = build_mixture(kind[4:], seed)
    made.set_experts_implementation("batched_mm")  # torch has grouped products up to float32 only
    mixture: nn.Module = made.to(dtype)
    return mixture


def optimizers_of(model: nn.Module) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    last = {id(module.weight) for name, module in model.named_modules() if name.endswith("lm_head")}
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    hidden = [item for item in model.parameters() if item.ndim == 2 and id(item) not in last | tables]
    chosen = {id(item) for item in hidden}
    rest = [item for item in model.parameters() if id(item) not in chosen]
    return torch.optim.Muon(hidden, lr=0.02, weight_decay=0.1), torch.optim.AdamW(rest, lr=0.01, eps=1e-4)


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(tokens[:, :-1])
    logits = getattr(logits, "logits", logits)
    return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def plain(
    kind: str, steps: int, window: int = 1, dtype: torch.dtype = torch.float64, **settings: Any
) -> dict[str, Any]:
    """One process, plain PyTorch, whole batches."""
    model, chunks = model_of(kind, dtype), batches(steps).split(BATCH)
    optimizers = optimizers_of(model)
    windows = (chunks[begin : begin + window] for begin in range(0, steps, window))
    found = plain_windows(model, optimizers, windows, loss_of)
    return {**found, "momentum": [state["momentum_buffer"] for state in optimizers[0].state.values()]}


def train(
    accelerator: Accelerator,
    kind: str,
    steps: int,
    dtype: torch.dtype = torch.float64,
    order: str = "model first",
) -> dict[str, Any]:
    """The run of :func:`plain`; only rank 0 starts with the same weights."""
    model = model_of(kind, dtype, seed=accelerator.process_index)
    optimizers: Any = optimizers_of(model)
    # A scheduler wraps the method `step` of its optimizer before that is prepared.
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizers[0], factor=1.0)
    if order == "model first":
        model, *optimizers = accelerator.prepare(model, *optimizers)
    else:
        optimizers = accelerator.prepare(*optimizers)
        model = accelerator.prepare(model)
    scheduler = accelerator.prepare(scheduler)
    ranks = accelerator.strategy.data_collectives.world_size
    loader = accelerator.prepare(DataLoader(batches(steps), batch_size=BATCH // ranks))

    def step(tokens: torch.Tensor) -> torch.Tensor:
        loss = loss_of(model, tokens)
        accelerator.backward(loss)
        return loss

    found = train_windows(accelerator, model, [*optimizers, Scheduler(scheduler)], loader, step)
    states = [state["momentum_buffer"] for state in optimizers[0].state.values()]
    return {**found, "held": sum(getattr(state, "_local_tensor", state).numel() for state in states)}


class Scheduler:
    """A scheduler that is stepped after the optimizers."""

    def __init__(self, scheduler: Any) -> None:
        self.step = scheduler.step

    def zero_grad(self) -> None:
        """Do nothing."""


def deviations(found: dict[str, Any], expected: dict[str, Any]) -> dict[str, float]:
    """The largest relative deviation of losses, norms and weights."""
    apart = {
        key: max(abs(one - other) / abs(other) for one, other in zip(found[key], expected[key], strict=True))
        for key in ("losses", "norms")
    }
    assert set(found["weights"]) == set(expected["weights"])
    apart["weights"] = max(
        ((found["weights"][name].cpu() - value).norm() / value.norm().clamp(min=1e-12)).item()
        for name, value in expected["weights"].items()
    )
    return apart

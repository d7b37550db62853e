"""Training in accumulation windows, with an Accelerator and in one process of plain PyTorch, and their comparison."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

# fp32 on several ranks adds the same numbers in another order.
TOLERANCE = 1e-4


def copied(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in weights.items()}


def plain_windows(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    windows: Iterable[Iterable[Any]],
    loss_of: Callable[[nn.Module, Any], torch.Tensor],
    max_norm: float = 0.5,
) -> dict[str, Any]:
    """One process, plain PyTorch: the loss of a window is the mean of those of its batches."""
    losses, norms = [], []
    for window in windows:
        total = torch.stack([loss_of(model, batch) for batch in window]).mean()
        total.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), max_norm).item())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(total.item())
    return {"losses": losses, "norms": norms, "weights": copied(model.state_dict())}


def train_windows(
    accelerator: Any,
    model: Any,
    optimizers: Sequence[Any],
    batches: Iterable[Any],
    step: Callable[[Any], torch.Tensor],
    max_norm: float = 0.5,
) -> dict[str, Any]:
    """The run of :func:`plain_windows` with an Accelerator; ``step`` computes a loss with its backward pass."""
    losses, norms, of_window = [], [], []
    for batch in batches:
        with accelerator.accumulate(model):
            loss = step(batch)
            if accelerator.sync_gradients:
                norms.append(accelerator.clip_grad_norm_(model.parameters(), max_norm).item())
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        of_window.append(accelerator.reduce(loss.detach(), "mean").item())
        if accelerator.sync_gradients:
            losses.append(sum(of_window) / len(of_window))
            of_window.clear()
    held = sum(getattr(parameter, "_local_tensor", parameter).numel() for parameter in model.parameters())
    weights = copied(accelerator.get_state_dict(model))
    accelerator.free_memory()
    return {"losses": losses, "norms": norms, "weights": weights, "held": held}


def assert_weights(
    found: dict[str, Any], expected: dict[str, Any], what: Any = "", tolerance: float = TOLERANCE
) -> None:
    assert set(found) == set(expected), what
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, rtol=0, atol=tolerance, msg=lambda text, name=name: f"{what}, {name}: {text}"
        )


def assert_same(
    found: dict[str, Any],
    expected: dict[str, Any],
    what: Any,
    tolerance: float = TOLERANCE,
    norm_tolerance: float | None = None,
) -> None:
    for key, limit in (("losses", tolerance), ("norms", norm_tolerance or tolerance)):
        torch.testing.assert_close(
            found[key], expected[key], rtol=0, atol=limit, msg=lambda text, key=key: f"{what}, {key}: {text}"
        )
    assert_weights(found["weights"], expected["weights"], what, tolerance)

"""Accumulation windows that are open when a state is saved: how far they are, and the gradients they hold so far.

Gradients that are not synchronised yet are each rank's own, so every rank has a file of its own. On another number of
processes each takes an equal share of them all, so that what is synchronised at the end of the window is the same. Of a
model that is divided among ranks the file of rank 0 has their average, of which each then takes its part.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from accel_state import get_logger

from ..core.unwrap import clean_name, extract_model_from_parallel
from ..training.gradient_accumulation import Accumulation, Window
from .safe_load import CheckpointError

if TYPE_CHECKING:
    from ..strategies.base import Strategy

logger = get_logger(__name__)

_STEM = "gradients"


def gradients_file(rank: int) -> str:
    """The file name of a rank's open windows."""
    return f"{_STEM}_{rank}.bin"


def gradients_files(names: Sequence[str]) -> list[str]:
    """Those of the names that :func:`gradients_file` could have given, by rank."""
    found = [name for name in names if re.fullmatch(rf"{_STEM}_[0-9]+\.bin", name)]
    return sorted(found, key=lambda name: int(name[len(_STEM) + 1 : -4]))


def capture(accumulation: Accumulation, loaders: Sequence[Any], models: Sequence[nn.Module]) -> dict[str, Any] | None:
    """The open windows and their gradients: tensors and plain values only; None if there is no window to keep. Every
    rank must call it.

    Args:
        accumulation: keeps the windows.
        loaders: the prepared loaders, which windows are found by.
        models: the prepared models, likewise.
    """
    windows = [_describe(window, index, models) for index, window in _open_windows(accumulation, loaders)]
    used = sorted({model for window in windows for model in window["models"]})
    if not used:
        return None
    strategy, local, averaged = accumulation.strategy, {}, {}
    supported = strategy.saves_gradients and (
        strategy.shards_parameters or all(_is_whole(item) for index in used for item in models[index].parameters())
    )
    if not supported:
        logger.warning(
            "The state is saved within an accumulation window, but %s cannot save the accumulated gradients: a resumed "
            "run starts a new window. Save after an optimizer step to lose nothing.",
            type(strategy).__name__,
        )
        return None
    for index in used:
        if strategy.shards_parameters:
            averaged[index] = strategy.gather_gradients(models[index])
        else:
            local[index] = _gradients(models[index])
    ranks = strategy.averaging_collectives.world_size
    return {"windows": windows, "gradients": local, "averaged": averaged, "averaging_ranks": ranks}


def _open_windows(accumulation: Accumulation, loaders: Sequence[Any]) -> list[tuple[int, Window]]:
    """Windows with the index of their loader, -1 for those without."""
    found = [(-1, window) for window in accumulation.windows_of(None)]
    for key, windows in accumulation.windows_by_loader():
        # A loader with batches skipped counts epochs together with the one it was made from.
        clock = getattr(key, "_clock", None)
        matching = [
            i
            for i, loader in enumerate(loaders)
            if loader is key or (clock is not None and getattr(loader, "_clock", 0) is clock)
        ]
        found += [(matching[0], window) for window in windows if matching]
    return [(index, window) for index, window in found if window.position]


def _describe(window: Window, loader: int, models: Sequence[nn.Module]) -> dict[str, Any]:
    return {
        "loader": loader,
        "models": [i for i, model in enumerate(models) if any(model is own for own in window.models)],
        "divisor": window.divisor,
        "position": window.position,
        "by_items": window.by_items,
        "items": window.items,
        "normaliser": window.normaliser,
    }


def _is_whole(parameter: nn.Parameter) -> bool:
    """Whether a parameter and its gradient are of ordinary tensors, which lie on this rank as a whole."""
    gradient = parameter.grad
    plain = type(parameter) in (nn.Parameter, torch.Tensor) and type(parameter.data) is torch.Tensor
    return plain and (gradient is None or (gradient.layout is torch.strided and gradient.shape == parameter.shape))


def _gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    named = extract_model_from_parallel(model, keep_torch_compile=False).named_parameters()
    return {clean_name(name): parameter.grad for name, parameter in named if parameter.grad is not None}


def combine(saved: Sequence[dict[str, Any]], num_processes: int) -> dict[str, Any]:
    """The share that each of ``num_processes`` ranks takes of the windows of all ranks that saved.

    Synchronising averages over ranks. Losses that count the same are averaged, so each rank takes the mean; of losses
    that are weighed by items the gradients are sums, so each takes a part of the sum, and of the number of items.

    Args:
        saved: what the ranks have saved, by rank.
        num_processes: the ranks that gradients are averaged over now.
    """
    windows = [dict(window) for window in saved[0]["windows"]]
    # Ranks that shared their samples had the same items.
    before = saved[0].get("averaging_ranks", len(saved))
    factors = dict.fromkeys([*saved[0]["gradients"], *saved[0].get("averaged", ())], 1.0)
    for number, window in enumerate(windows):
        if window["by_items"]:
            items = sum(torch.as_tensor(rank["windows"][number]["items"]) for rank in saved)
            window["items"] = items * before / len(saved) / num_processes
            factors.update(dict.fromkeys(window["models"], before / num_processes))
    gradients = {
        index: {
            name: sum(rank["gradients"][index][name] for rank in saved if name in rank["gradients"][index])
            / (len(saved) / factors[index])
            for name in sorted({name for rank in saved for name in rank["gradients"][index]})
        }
        for index in saved[0]["gradients"]
    }
    averaged = {
        index: {name: gradient * factors[index] if factors[index] != 1 else gradient for name, gradient in own.items()}
        for index, own in saved[0].get("averaged", {}).items()
    }
    return {"windows": windows, "gradients": gradients, "averaged": averaged, "averaging_ranks": num_processes}


def check(
    saved: Any, source: str, loaders: Sequence[Any], models: Sequence[nn.Module], strategy: Strategy | None = None
) -> None:
    """Raise CheckpointError if windows do not fit what was prepared."""
    try:
        for window in saved["windows"]:
            fits = -1 <= window["loader"] < len(loaders) and all(0 <= index < len(models) for index in window["models"])
            if not fits or not 0 < window["position"] < window["divisor"]:
                raise CheckpointError(f"{source} holds a window of a loader or a model that was not prepared.")
        for index, gradients in [*saved["gradients"].items(), *saved.get("averaged", {}).items()]:
            known = _shapes(models[index]) if strategy is None else strategy.gradient_shapes(models[index])
            wrong = [name for name, gradient in gradients.items() if name not in known or known[name] != gradient.shape]
            if wrong:
                raise CheckpointError(
                    f"{source} holds gradients of {', '.join(wrong[:5])}, which do not fit model {index}."
                )
    except (TypeError, KeyError, AttributeError, IndexError) as error:
        raise CheckpointError(f"{source} does not hold the gradients of accumulation windows: {error!r}") from error


def _shapes(model: nn.Module) -> dict[str, torch.Size]:
    named = extract_model_from_parallel(model, keep_torch_compile=False).named_parameters()
    return {clean_name(name): parameter.shape for name, parameter in named}


def restore(
    accumulation: Accumulation, saved: dict[str, Any] | None, loaders: Sequence[Any], models: Sequence[nn.Module]
) -> None:
    """Put windows and gradients back, in place of those that are open now.

    Args:
        accumulation: keeps the windows.
        saved: what :func:`capture` or :func:`combine` returned.
        loaders: the prepared loaders.
        models: the prepared models.
    """
    strategy = accumulation.strategy
    stale = {id(model): model for _, window in _open_windows(accumulation, loaders) for model in window.models}
    for model in stale.values():
        strategy.drop_gradients(model)
    accumulation.forget()
    accumulation.gradient_state.sync_gradients = saved is None
    for window in [] if saved is None else saved["windows"]:
        fields = {name: window[name] for name in ("divisor", "position", "by_items", "items", "normaliser")}
        owners = tuple(models[index] for index in window["models"])
        accumulation.add_window(None if window["loader"] < 0 else loaders[window["loader"]], Window(owners, **fields))
    for kind in ("gradients", "averaged") if saved is not None else ():
        for index, gradients in (saved or {}).get(kind, {}).items():
            strategy.put_gradients(models[index], gradients)

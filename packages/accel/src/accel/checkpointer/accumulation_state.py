"""Accumulation windows that are open when a state is saved: their positions, and the gradients accumulated so far.

Gradients that are not synchronised yet differ between ranks, so every rank has a file of its own. On another number of
processes, each takes an equal share of all of them, so that the synchronised gradient at the end of the window is the
same. For a sharded model, the file of rank 0 has the average, of which each rank then takes its shard.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import NoneType
from typing import Any, Final

import torch
from torch import nn

from accel_checkpoint.names import CheckpointError, require_number
from accel_state import get_logger

from ..contract.accumulated_gradients import AccumulatedGradients
from ..core.unwrap import clean_name, extract_model_from_parallel
from ..training.gradient_accumulation import Accumulation, Window

logger: Final = get_logger(__name__)

_WINDOW_FIELDS = ("divisor", "position", "by_items", "items", "normaliser")


def capture(accumulation: Accumulation, loaders: Sequence[Any], models: Sequence[nn.Module]) -> dict[str, Any] | None:
    """Return the open windows and their gradients, as tensors and plain values; None if there is nothing to save."""
    windows = []
    for loader, window in _open_windows(accumulation, loaders):
        indices = [i for i, model in enumerate(models) if any(model is other for other in window.models)]
        fields = {name: getattr(window, name) for name in _WINDOW_FIELDS}
        windows.append({"loader": loader, "models": indices, **fields})
    used = sorted({index for window in windows for index in window["models"]})
    if not used:
        return None
    strategy, local, averaged = accumulation.strategy, {}, {}
    supported = strategy.gradients.can_be_saved and (
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
            averaged[index] = strategy.gradients.gather(models[index])
        else:
            named = extract_model_from_parallel(models[index], keep_torch_compile=False).named_parameters()
            local[index] = {clean_name(name): item.grad for name, item in named if item.grad is not None}
    ranks = strategy.averaging_collectives.world_size
    return {"windows": windows, "gradients": local, "averaged": averaged, "averaging_ranks": ranks}


def _open_windows(accumulation: Accumulation, loaders: Sequence[Any]) -> list[tuple[int, Window]]:
    """Windows with the index of their loader, -1 for those without a loader."""
    indexed = [(-1, window) for window in accumulation.windows_of(None)]
    for key, windows in accumulation.windows_by_loader():
        # A loader with skipped batches shares the epoch counter of the loader it was made from.
        clock = getattr(key, "clock", None)
        for index, loader in enumerate(loaders):
            if loader is key or (clock is not None and getattr(loader, "clock", 0) is clock):
                indexed += [(index, window) for window in windows]
                break
    return [(index, window) for index, window in indexed if window.position]


def _is_whole(parameter: nn.Parameter) -> bool:
    """Return True if a parameter and its gradient are ordinary tensors, which are complete on this rank."""
    gradient = parameter.grad
    plain = type(parameter) in (nn.Parameter, torch.Tensor) and type(parameter.data) is torch.Tensor
    return plain and (gradient is None or (gradient.layout is torch.strided and gradient.shape == parameter.shape))


def combine(saved: Sequence[dict[str, Any]], num_processes: int) -> dict[str, Any]:
    """Return the share that each of ``num_processes`` ranks takes of the windows of all ranks that saved."""
    windows = [dict(window) for window in saved[0]["windows"]]
    # Ranks that shared their samples had the same items.
    before = saved[0].get("averaging_ranks", len(saved))
    # Averaged losses: each rank takes the mean. Losses weighted by items are sums: a share of the sum and of the items.
    factors = dict.fromkeys([*saved[0]["gradients"], *saved[0].get("averaged", ())], 1.0)
    for number, window in enumerate(windows):
        if window["by_items"]:
            items = sum(torch.as_tensor(rank["windows"][number]["items"]) for rank in saved)
            window["items"] = items * before / len(saved) / num_processes
            factors.update(dict.fromkeys(window["models"], before / num_processes))
    gradients: dict[int, dict[str, Any]] = {}
    for index in saved[0]["gradients"]:
        of_ranks = [rank["gradients"][index] for rank in saved]
        divisor = len(saved) / factors[index]
        gradients[index] = {}
        for name in sorted(set().union(*of_ranks)):
            gradients[index][name] = sum(named[name] for named in of_ranks if name in named) / divisor
    averaged: dict[int, Mapping[str, Any]] = {}
    for index, named in saved[0].get("averaged", {}).items():
        factor = factors[index]
        averaged[index] = named if factor == 1 else {name: gradient * factor for name, gradient in named.items()}
    return {"windows": windows, "gradients": gradients, "averaged": averaged, "averaging_ranks": num_processes}


def check(
    saved: Any,
    source: str,
    loaders: Sequence[Any],
    models: Sequence[nn.Module],
    accumulated: AccumulatedGradients,
) -> None:
    """Raise CheckpointError if windows do not fit the prepared objects."""
    try:
        for window in saved["windows"]:
            for name in ("position", "divisor"):
                require_number(window[name], f"{source}: {name}")
            for name in ("items", "normaliser"):
                if not isinstance(window[name], (int, float, torch.Tensor, NoneType)):
                    raise CheckpointError(f"{source} has {name}={window[name]!r}, which is not a number.")
            fits = -1 <= window["loader"] < len(loaders) and all(0 <= index < len(models) for index in window["models"])
            if not fits or not 0 < window["position"] < window["divisor"]:
                raise CheckpointError(f"{source} holds a window of a loader or a model that was not prepared.")
        for index, gradients in [*saved["gradients"].items(), *saved.get("averaged", {}).items()]:
            known = accumulated.shapes(models[index])
            wrong = [name for name, gradient in gradients.items() if name not in known or known[name] != gradient.shape]
            if wrong:
                raise CheckpointError(
                    f"{source} holds gradients of {', '.join(wrong[:5])}, which do not fit model {index}."
                )
    except (TypeError, KeyError, AttributeError, IndexError) as error:
        raise CheckpointError(f"{source} does not hold the gradients of accumulation windows: {error!r}") from error


def restore(
    accumulation: Accumulation, saved: dict[str, Any] | None, loaders: Sequence[Any], models: Sequence[nn.Module]
) -> None:
    """Restore windows and gradients, in place of those that are open now."""
    strategy = accumulation.strategy
    stale = {id(model): model for _, window in _open_windows(accumulation, loaders) for model in window.models}
    for model in stale.values():
        strategy.gradients.drop(model)
    accumulation.forget()
    accumulation.gradient_state.sync_gradients = saved is None
    if saved is None:
        return
    for window in saved["windows"]:
        fields = {name: window[name] for name in _WINDOW_FIELDS}
        owners = tuple(models[index] for index in window["models"])
        accumulation.add_window(None if window["loader"] < 0 else loaders[window["loader"]], Window(owners, **fields))
    for kind in ("gradients", "averaged"):
        for index, gradients in saved.get(kind, {}).items():
            strategy.gradients.put(models[index], gradients)

"""Which loader a micro batch or a value belongs to, while several are being iterated."""

from __future__ import annotations

from typing import Any

from accel_data import PreparedLoader
from accel_state import GradientState
from accel_state.errors import ConfigurationError
from accel_state.logging import warn_once
from accel_state.operations.nested import leaves


def open_loader(loader: Any, gradient_state: GradientState, call: str) -> Any:
    """``loader`` or the one that ``skip_first_batches`` made from it, whichever is being iterated; None if neither is.

    Raises:
        ConfigurationError: ``loader`` was not prepared.
    """
    if not isinstance(loader, PreparedLoader):
        raise ConfigurationError(
            f"{call} got loader={type(loader).__name__}, which prepare() did not return. Pass the prepared loader that "
            "the data came from."
        )
    found = (one for one in gradient_state.dataloader_references[1:] if getattr(one, "clock", None) is loader.clock)
    return next(found, None)


def loader_of(data: Any, loader: Any, gradient_state: GradientState) -> Any:
    """Return the loader that values to gather came from; None outside of loops over loaders.

    Among several open loaders it is the one that the caller names, the one whose batch a tensor of ``data`` is part of,
    or else the first that yielded a batch for the current step. All ranks find the same.

    Raises:
        ConfigurationError: ``loader`` is not being iterated, or tensors are of different loaders that do not have the
            same padding.
    """
    gradient_state.batch_used = True
    if loader is not None:
        found = open_loader(loader, gradient_state, "gather_for_metrics")
        if found is None:
            raise ConfigurationError(
                "gather_for_metrics got a loader that is not being iterated, so the padding of its batch is not known. "
                "Call it in the loop over this loader, or use gather()."
            )
        return found
    if not gradient_state.has_several_dataloaders:
        return gradient_state.active_dataloader
    owners = _owners(data, gradient_state.dataloader_references[1:])
    if len({_padding(owner) for owner in owners}) > 1:
        raise ConfigurationError(
            "gather_for_metrics got tensors from the batches of different loaders, which have different padding. Call "
            "it once for the values of each loader."
        )
    candidates = owners or gradient_state.step_dataloaders
    if len({_padding(candidate) for candidate in candidates}) > 1:
        warn_once(
            __name__,
            "gather_for_metrics was called while several loaders are being iterated, and one of them has padding. The "
            "values were taken for those of the loader whose batch came first. Pass the loader that they come from: "
            "gather_for_metrics(values, loader=loader).",
        )
    return candidates[0] if candidates else None


def _owners(data: Any, loaders: list[Any]) -> list[Any]:
    """Return the loaders whose current batches contain tensors of ``data``; tensors of several batches do not count."""
    owners: dict[int, Any] = {}
    for tensor in leaves(data):
        of_tensor = [loader for loader in loaders if isinstance(loader, PreparedLoader) and loader.yielded(tensor)]
        if len(of_tensor) == 1:
            owners[id(of_tensor[0])] = of_tensor[0]
    return list(owners.values())


def _padding(loader: Any) -> object:
    """Return what a gather drops from the current batch of a loader."""
    if getattr(loader, "ragged", False):
        return "ragged", loader.real_samples
    return loader.remainder if loader.end_of_dataloader and loader.remainder > 0 else None

"""A loader around a torch loader: rebuilt with other samplers, otherwise the same in every setting."""

from __future__ import annotations

import warnings
from typing import Any

from torch.utils.data import DataLoader

from accel_state.errors import ConfigurationError, require

# Settings that go over to a rebuilt loader as they are. Not all of them exist in every supported version of torch.
_SETTINGS = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
    "pin_memory_device",
    "in_order",
    "snapshot_every_n_steps",
)
_BATCHING = ("batch_size", "drop_last", "sampler", "batch_sampler", "dataset")


def stateful_dataloader_class() -> type[DataLoader[Any]]:
    """The StatefulDataLoader of torchdata.

    Raises:
        MissingDependencyError: torchdata is not installed.
    """
    module = require(
        "torchdata.stateful_dataloader", purpose="use_stateful_dataloader=True", install="accel-data[stateful]"
    )
    loader_class: type[DataLoader[Any]] = module.StatefulDataLoader
    return loader_class


def loader_settings(dataloader: DataLoader[Any]) -> dict[str, Any]:
    """The keyword arguments that build a loader like this one, apart from its data set, batching and order."""
    settings = {name: getattr(dataloader, name) for name in _SETTINGS if hasattr(dataloader, name)}
    if not settings.get("pin_memory_device"):
        settings.pop("pin_memory_device", None)
    if not settings["num_workers"]:
        settings.pop("multiprocessing_context", None)
    return settings


def warn_about_lost_iteration(dataloader: DataLoader[Any]) -> None:
    """Warn if the loader's class iterates in a way of its own, which a rebuilt loader does not have."""
    overridden = type(dataloader).__iter__
    if overridden is DataLoader.__iter__ or overridden.__module__.startswith("torchdata."):
        return
    warnings.warn(
        f"{type(dataloader).__name__} overrides __iter__, and a prepared loader does not call it: loaders are rebuilt "
        "around the data set, "
        "the sampler and the collate function. Move what it does there.",
        stacklevel=3,
    )


class DataLoaderAdapter(DataLoader[Any]):
    """A loader that holds a torch loader and passes on every setting of it, to read and to set.

    Args:
        dataset: data set to load.
        use_stateful_dataloader: build torchdata's StatefulDataLoader instead of torch's DataLoader.
        batch_sampler: batches of indices to load.
        **kwargs: other arguments of the loader.

    Attributes:
        base_dataloader: the torch loader.

    Raises:
        MissingDependencyError: ``use_stateful_dataloader`` without torchdata.
    """

    base_dataloader: DataLoader[Any]
    use_stateful_dataloader: bool

    def __init__(
        self, dataset: Any, use_stateful_dataloader: bool = False, batch_sampler: Any = None, **kwargs: Any
    ) -> None:
        # DataLoader.__init__ is not called: this object is a DataLoader to isinstance, and base_dataloader to
        # everything else.
        loader_class = stateful_dataloader_class() if use_stateful_dataloader else DataLoader
        self.use_stateful_dataloader = use_stateful_dataloader
        self.base_dataloader = loader_class(dataset, batch_sampler=batch_sampler, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "base_dataloader":
            raise AttributeError(name)
        return getattr(self.base_dataloader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _SETTINGS or name in _BATCHING:
            setattr(self.base_dataloader, name, value)
        else:
            object.__setattr__(self, name, value)

    def __len__(self) -> int:
        return len(self.base_dataloader)

    def __iter__(self) -> Any:
        return iter(self.base_dataloader)

    def state_dict(self) -> dict[str, Any]:
        """The position in the data, for :meth:`load_state_dict`.

        Raises:
            ConfigurationError: the torch loader keeps none.
        """
        state: dict[str, Any] = self._stateful_base().state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a position in the next iteration.

        Raises:
            ConfigurationError: the torch loader cannot.
        """
        self._stateful_base().load_state_dict(state_dict)

    def _stateful_base(self) -> Any:
        if not self.use_stateful_dataloader:
            raise ConfigurationError(
                "a torch DataLoader keeps no position. Pass use_stateful_dataloader=True, or use prepare_data_loader: "
                "every prepared "
                "loader can be resumed."
            )
        return self.base_dataloader

    def adjust_state_dict_for_prefetch(self) -> None:
        """Keep the state in ``dl_state_dict``: that after the batches handed out, whatever was read ahead of them."""
        self.dl_state_dict = self.state_dict()

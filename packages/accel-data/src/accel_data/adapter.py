"""A wrapper around a torch loader that forwards every setting."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader

from accel_state.errors import ConfigurationError, require
from accel_state.state import GradientState

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    T_co = TypeVar("T_co", covariant=True, default=Any)  # a sample of the data set, as in torch's DataLoader
else:
    from typing import TypeVar

    T_co = TypeVar("T_co", covariant=True)


class DataLoaderStateMixin:
    """The state of an iteration that a loader publishes to the GradientState.

    Attributes:
        end_of_dataloader: whether the current batch is the last one.
        remainder: samples in the last global step that are not padding; -1 if a gather has nothing to drop.
        ragged: whether batch sizes may differ between ranks in one step; the same on all ranks.
        real_samples: samples of the current batch that are not padding; None if it has no padding.
    """

    end_of_dataloader: bool = False
    remainder: int = -1
    ragged: bool = False
    real_samples: int | None = None
    gradient_state: GradientState

    def reset(self) -> None:
        """Clear the state of the latest iteration."""
        self.end_of_dataloader = False
        self.remainder = -1
        self.real_samples = None

    def begin(self) -> None:
        """Register the loader at the start of an iteration."""
        self.reset()
        self.gradient_state._add_dataloader(self)

    def end(self) -> None:
        """Unregister the loader when an iteration ended or was abandoned."""
        self.gradient_state._remove_dataloader(self)


# Settings copied to a rebuilt loader. Some exist only in newer versions of torch, or in torchdata.
_SETTINGS = (
    *("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "generator"),
    *("prefetch_factor", "persistent_workers", "pin_memory_device", "in_order", "snapshot_every_n_steps"),
)
_BATCHING = ("batch_size", "drop_last", "sampler", "batch_sampler", "dataset")


def stateful_dataloader_class() -> type[DataLoader[Any]]:
    """Return the StatefulDataLoader of torchdata; raises MissingDependencyError without torchdata."""
    module = require(
        "torchdata.stateful_dataloader", purpose="use_stateful_dataloader=True", install="accel-data[stateful]"
    )
    loader_class: type[DataLoader[Any]] = module.StatefulDataLoader
    return loader_class


_stateful_variants: dict[Any, type[DataLoaderAdapter]] = {}


def _stateful_variant(cls: type[DataLoaderAdapter], loader_class: type[DataLoader[Any]]) -> type[DataLoaderAdapter]:
    """Return the subclass of an adapter class whose instances are instances of StatefulDataLoader as well."""
    variant = _stateful_variants.get((cls, loader_class))
    if variant is None:
        names = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
        variant = type(cls.__name__, (cls, loader_class), {**names, "_plain_class": cls})
        _stateful_variants[cls, loader_class] = variant
    return variant


def _new_stateful(cls: type[DataLoaderAdapter]) -> DataLoaderAdapter:
    """Return an empty object of the stateful variant, for a pickle to fill."""
    variant = _stateful_variant(cls, stateful_dataloader_class())
    return variant.__new__(variant)


def loader_settings(dataloader: DataLoader[Any], stateful: bool = True) -> dict[str, Any]:
    """Keyword arguments that rebuild the loader, ``stateful`` or not, except for its data set, batching and order."""
    settings = {name: getattr(dataloader, name) for name in _SETTINGS if hasattr(dataloader, name)}
    if not settings.get("pin_memory_device"):
        settings.pop("pin_memory_device", None)
    if not settings["num_workers"]:
        settings.pop("multiprocessing_context", None)
    if not stateful:
        settings.pop("snapshot_every_n_steps", None)
    return settings


def warn_about_custom_iter(dataloader: DataLoader[Any]) -> None:
    """Warn that the loader's class overrides ``__iter__``, which a rebuilt loader does not call."""
    if type(dataloader).__iter__.__module__.startswith("torchdata."):
        return
    warnings.warn(
        f"{type(dataloader).__name__} overrides __iter__, and a prepared loader does not call it: loaders are rebuilt "
        "around the data set, the sampler and the collate function. Move the logic there.",
        stacklevel=3,
    )


class DataLoaderAdapter(DataLoader[T_co]):
    """A loader that wraps a torch loader and forwards reading and setting of every attribute.

    Args:
        dataset: data set to load.
        use_stateful_dataloader: build torchdata's StatefulDataLoader instead of torch's DataLoader. The wrapper is then
            an instance of StatefulDataLoader too.
        batch_sampler: yields lists of indices to load.
        **kwargs: other arguments of the torch loader.

    Attributes:
        base_dataloader: the torch loader.

    Raises:
        MissingDependencyError: ``use_stateful_dataloader`` without torchdata.
    """

    base_dataloader: DataLoader[Any]
    use_stateful_dataloader: bool
    _plain_class: type[DataLoaderAdapter] | None = None

    def __init__(
        self, dataset: Any, use_stateful_dataloader: bool = False, batch_sampler: Any = None, **kwargs: Any
    ) -> None:
        # DataLoader.__init__ is not called: the base class is for isinstance only, base_dataloader does the work.
        loader_class = stateful_dataloader_class() if use_stateful_dataloader else DataLoader
        base = loader_class(dataset, batch_sampler=batch_sampler, **kwargs)
        vars(self).update(use_stateful_dataloader=use_stateful_dataloader, base_dataloader=base)
        if use_stateful_dataloader and self._plain_class is None:
            self.__class__ = _stateful_variant(type(self), loader_class)

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self._plain_class is None:
            return super().__reduce_ex__(protocol)
        return _new_stateful, (self._plain_class,), self.__getstate__()

    def __getstate__(self) -> dict[str, Any]:
        return dict(self.__dict__)

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
        """Return the position in the data, for :meth:`load_state_dict`.

        Raises:
            ConfigurationError: the torch loader is not a StatefulDataLoader.
        """
        state: dict[str, Any] = self._stateful_base().state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a saved position in the next iteration.

        Raises:
            ConfigurationError: the torch loader is not a StatefulDataLoader.
        """
        self._stateful_base().load_state_dict(state_dict)

    def _stateful_base(self) -> Any:
        if not self.use_stateful_dataloader:
            raise ConfigurationError(
                "a torch DataLoader does not save its position. Pass use_stateful_dataloader=True, or use "
                "prepare_data_loader: every prepared loader can be resumed."
            )
        return self.base_dataloader

    def adjust_state_dict_for_prefetch(self) -> None:
        """Store the state after the batches handed out, ignoring prefetched ones, in ``dl_state_dict``."""
        self.dl_state_dict: dict[str, Any] = self.state_dict()

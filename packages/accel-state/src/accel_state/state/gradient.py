"""Gradient accumulation: its settings, whether gradients are synchronized, and the loader of the current batch."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from ..context import SharedState
from ..errors import ConfigurationError


@dataclass
class GradientAccumulationPlugin:
    """Settings of gradient accumulation.

    Args:
        num_steps: micro batches per optimizer step. None uses the launcher's setting, or 1.
        adjust_scheduler: count the calls of a prepared scheduler during accumulation in its ``_step_count``. They do
            not change the learning rate in either case.
        sync_with_dataloader: end the accumulation window at the end of a data loader, even if it is incomplete.
        sync_each_batch: synchronize gradients in every micro batch. This costs communication, but saves the unsharded
            copy of the gradients that sharded strategies need otherwise.

    Raises:
        ConfigurationError: ``num_steps`` is not a positive integer.

    Examples:
        >>> plugin = GradientAccumulationPlugin(num_steps=4, sync_with_dataloader=False)
        >>> plugin.num_steps
        4
    """

    num_steps: int | None = None
    adjust_scheduler: bool = True
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False

    def __post_init__(self) -> None:
        check_steps("GradientAccumulationPlugin.num_steps", self.num_steps)

    def to_dict(self) -> dict[str, Any]:
        """Return all settings by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def to_kwargs(self) -> dict[str, Any]:
        """Return the settings that differ from their defaults."""
        return {field.name: value for field in fields(self) if (value := getattr(self, field.name)) != field.default}


def check_steps(name: str, steps: object) -> None:
    """Raise ConfigurationError for a number of micro batches that is neither None nor a positive integer."""
    if steps is not None and (isinstance(steps, bool) or not isinstance(steps, int) or steps < 1):
        raise ConfigurationError(f"{name}={steps!r} must be a positive integer. Use 1 to turn accumulation off.")


@dataclass(slots=True, eq=False)
class MicroBatch:
    """One micro batch of an accumulation window.

    Attributes:
        position: its number in the window, from 1.
        closes: whether it is the window's last.
        backwards: backward passes in it so far.
    """

    position: int
    closes: bool
    backwards: int = 0


class GradientState(SharedState):
    """Shared by the Accelerator, the prepared loaders, optimizers and schedulers.

    Attributes:
        sync_gradients: whether this batch ends an accumulation window, so that gradients are synchronized and applied.
        plugin_kwargs: the settings of gradient accumulation.
        keeps_gradients: whether ``zero_grad`` keeps the gradients, which an optimizer step is being computed from; None
            keeps them unless ``sync_gradients`` is set.
        micro_batch: the micro batch of the current ``accumulate`` block; None outside of blocks and for windows of one.
        batch_used: whether a micro batch, a backward pass or a gather used the latest batch. Batches that loaders yield
            before that belong to one step.
        is_xla_gradients_synced: on XLA, whether gradients were reduced since the last optimizer step.
    """

    _slot: ClassVar[str] = "gradient"

    sync_gradients: bool
    plugin_kwargs: dict[str, Any]
    is_xla_gradients_synced: bool = False
    keeps_gradients: bool | None = None
    micro_batch: MicroBatch | None = None
    batch_used: bool
    _loaders: list[weakref.ref[Any]]
    _of_step: list[weakref.ref[Any]]  # those that yielded a batch for the current step, while several are open
    _companions: weakref.WeakSet[Any]  # those that yielded a batch for the same step as another

    def __init__(self, gradient_accumulation_plugin: GradientAccumulationPlugin | None = None) -> None:
        super().__init__()
        if not self.__dict__:
            self.sync_gradients = True
            self._loaders = []
            self._of_step = []
            self._companions = weakref.WeakSet()
            self.batch_used = True
            self.is_xla_gradients_synced = False
            self.plugin_kwargs = {}
        if gradient_accumulation_plugin is not None:
            self.plugin_kwargs = gradient_accumulation_plugin.to_kwargs()

    @property
    def num_steps(self) -> int:
        """Micro batches in an accumulation window."""
        return int(self.plugin_kwargs.get("num_steps") or 1)

    @property
    def adjust_scheduler(self) -> bool:
        """True if schedulers count calls during accumulation, which do not change the learning rate."""
        return bool(self.plugin_kwargs.get("adjust_scheduler", True))

    @property
    def sync_with_dataloader(self) -> bool:
        """True if the end of a loader ends the accumulation window."""
        return bool(self.plugin_kwargs.get("sync_with_dataloader", True))

    @property
    def sync_each_batch(self) -> bool:
        """True if gradients are synchronized in every micro batch."""
        return bool(self.plugin_kwargs.get("sync_each_batch", False))

    @property
    def active_dataloader(self) -> Any:
        """The loader of the latest batch, while it is being iterated, or None."""
        loaders = self._loaders
        while loaders:
            loader = loaders[-1]()
            if loader is not None:
                return loader
            loaders.pop()
        return None

    @property
    def dataloader_references(self) -> list[Any]:
        """The loaders being iterated, the active one last, after an initial None."""
        return [None, *(loader for loader in (ref() for ref in self._loaders) if loader is not None)]

    @property
    def has_several_dataloaders(self) -> bool:
        """True if several prepared loaders are being iterated."""
        return len(self._loaders) > 1

    @property
    def step_dataloaders(self) -> list[Any]:
        """The loaders being iterated that yielded a batch for the current step, in this order; or the active one.

        A loop over ``zip(first, second)`` has both; an evaluation within a training step has its own loader only.
        """
        found = [loader for loader in (ref() for ref in self._of_step) if loader is not None]
        return found or self.dataloader_references[1:][-1:]

    @property
    def in_dataloader(self) -> bool:
        """True if a prepared loader is being iterated."""
        return self.active_dataloader is not None

    @property
    def end_of_dataloader(self) -> bool:
        """True if the current batch is the last one of the active loader."""
        loader = self.active_dataloader
        return False if loader is None else bool(loader.end_of_dataloader)

    @property
    def remainder(self) -> int:
        """Number of samples in the last global batch without padding; -1 if nothing is padded."""
        loader = self.active_dataloader
        return -1 if loader is None else int(loader.remainder)

    def _set_sync_gradients(self, sync_gradients: bool) -> None:
        self.sync_gradients = sync_gradients

    def _add_dataloader(self, dataloader: Any) -> None:
        """Add a loader that begins an iteration."""
        self._remove_dataloader(dataloader)
        others = self.dataloader_references[1:]
        if dataloader not in self._companions or not any(one in self._companions for one in others):
            # An inner loop, or the first step of a loop over several loaders.
            self._of_step = []
        elif len(others) == 1:
            self._of_step = list(self._loaders)
        # Weak, so that this list does not keep an abandoned loader and its workers alive.
        self._loaders.append(weakref.ref(dataloader))

    def activate(self, dataloader: Any) -> bool:
        """Make the loader that yields a batch the active one, which keeps nested and interleaved loops apart.

        Returns:
            Whether several loaders are being iterated.
        """
        loaders = self._loaders
        several = len(loaders) != 1 or loaders[0]() is not dataloader
        if several:
            self._activate_one_of_several(dataloader)
        self.batch_used = False
        return several

    def _activate_one_of_several(self, dataloader: Any) -> None:
        loader = weakref.ref(dataloader)
        of_step = [] if self.batch_used else [ref for ref in self._of_step if ref() is not None]
        before = next((i for i, ref in enumerate(of_step) if ref() is dataloader), None)
        if before is None or before < len(of_step) - 1:
            # A loader that yields again without any use of its batch begins a step, unless nothing else was read since.
            of_step = [*of_step[0 if before is None else before + 1 :], loader]
        if len(of_step) > 1:
            self._companions.update(ref() for ref in of_step)
        self._of_step = of_step
        self._loaders[:] = [*self._others(self._loaders, dataloader), loader]

    def _remove_dataloader(self, dataloader: Any) -> None:
        """Remove a loader whose iteration has ended or was abandoned."""
        several = self.has_several_dataloaders
        self._loaders[:] = self._others(self._loaders, dataloader)
        self._of_step = self._others(self._of_step, dataloader)
        if several and not self._of_step:
            # The latest batch, used or not, was one of the removed loader.
            self.batch_used = True

    @staticmethod
    def _others(loaders: list[weakref.ref[Any]], dataloader: Any) -> list[weakref.ref[Any]]:
        return [ref for ref in loaders if ref() is not None and ref() is not dataloader]

    def __repr__(self) -> str:
        return (
            f"Sync Gradients: {self.sync_gradients}\nAt end of current dataloader: {self.end_of_dataloader}\n"
            f"Extra samples added: {self.remainder}\nGradient accumulation plugin: {self.plugin_kwargs}\n"
        )

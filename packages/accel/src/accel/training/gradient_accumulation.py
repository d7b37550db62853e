"""Gradient accumulation: which micro batch ends a window, and how each loss is scaled.

Within a window of ``k`` micro batches each loss is scaled by ``1/k``. Two things are known only when a window ends:
that it is short, because the loader has ended, and the number of items (such as tokens) in it over all ranks. Both are
corrected at the start of the backward pass that ends the window, by rescaling the gradients accumulated so far, so that
the synchronised result is exact.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Literal

import torch
from torch import nn

from accel_data import DataLoaderConfiguration, PreparedLoader
from accel_state import GradientAccumulationPlugin, GradientState, PartialState
from accel_state.arguments import check_number
from accel_state.errors import ConfigurationError, check_type
from accel_state.logging import warn_once
from accel_state.state.gradient import MicroBatch, check_steps

from ..contract.optimizer import AcceleratedOptimizer
from ..contract.strategy import Strategy
from ..core.unwrap import PREPARED
from ..reduction.elastic_steps import ElasticSteps
from .open_loaders import open_loader

ItemReduction = Literal["mean", "sum"]
Models = tuple[nn.Module, ...]


def _no_loader() -> None:
    """Return None, as a weak reference to a loader that was collected."""


def _origin(loader: Any) -> Any:
    """Return the loader that ``skip_first_batches`` made a loader from; otherwise the loader itself."""
    return loader.origin if isinstance(loader, PreparedLoader) else loader


@dataclass(slots=True)
class Window:
    """One loader's (and one set of models') progress to the next optimizer step."""

    models: Models  # the models whose gradients accumulate
    divisor: int  # the number that each loss of the window is divided by
    position: int = 0  # micro batches in the window so far
    by_items: bool | None = None  # whether its losses are weighted by items; None before the first
    items: float | torch.Tensor = 0  # items of this rank in the window so far
    # the number of items that the gradients so far are divided by; None before the window ends
    normaliser: torch.Tensor | None = None
    counted_at: int = 0  # the last micro batch whose items were counted
    with_gradient: nn.Parameter | None = None  # that had one when the current micro batch began

    def count(self, items: int | torch.Tensor) -> None:
        """Add the items of a loss, which are the same items again if each of several models has a loss."""
        if self.counted_at == self.position and len(self.models) > 1:
            raise ConfigurationError(
                f"a second loss with num_items in a micro batch of {len(self.models)} models "
                f"({', '.join(type(model).__name__ for model in self.models)}): its items would be counted for all of "
                "them. Give each model a block of its own, `with accelerator.accumulate(model):`, or add the losses."
            )
        self.counted_at = self.position
        self.items = self.items + items

    def expect(self, by_items: bool) -> None:
        if self.by_items not in (None, by_items):
            raise ConfigurationError(
                "this accumulation window has losses with num_items and losses without, which cannot be combined. "
                "Pass num_items to every backward of a window, or to none."
            )
        self.by_items = by_items

    @property
    def parameters(self) -> Iterable[nn.Parameter]:
        return (parameter for model in self.models for parameter in model.parameters())


def accumulation_settings(
    steps: int, plugin: GradientAccumulationPlugin | None, launched: int | None
) -> GradientAccumulationPlugin:
    """Return the settings of gradient accumulation; the launcher's number of steps overrides the script's."""
    check_steps("gradient_accumulation_steps", steps)
    if plugin is not None:
        hint = f"Pass GradientAccumulationPlugin(num_steps={plugin!r})."
        check_type(plugin, GradientAccumulationPlugin, "gradient_accumulation_plugin", hint)
        if steps != 1:
            raise ConfigurationError(
                f"gradient_accumulation_steps={steps} and gradient_accumulation_plugin were both given. Put the number "
                f"into the plugin: GradientAccumulationPlugin(num_steps={steps})."
            )
        steps = plugin.num_steps or 1
    if launched is not None and steps not in (1, launched):
        warn_once(
            __name__,
            f"the script's gradient_accumulation_steps={steps} is overridden by the launcher's {launched} "
            "(ACCELERATE_GRADIENT_ACCUMULATION_STEPS). Give the number in one of them.",
        )
    return replace(plugin or GradientAccumulationPlugin(), num_steps=launched or steps)


class Accumulation:
    """Keeps the windows of an Accelerator."""

    def __init__(
        self,
        process: PartialState,
        gradient_state: GradientState,
        plugin: GradientAccumulationPlugin,
        strategy: Strategy,
        prepared_models: Sequence[nn.Module],
        prepared_optimizers: Sequence[Any],
    ) -> None:
        self.process = process
        self.gradient_state = gradient_state
        self.plugin: GradientAccumulationPlugin = plugin
        self.num_steps: int = plugin.num_steps or 1
        """Micro batches in a full window."""
        self.strategy = strategy
        self._skips_sync = strategy if strategy.skips_gradient_sync else None
        self._prepared_models = prepared_models
        self._prepared_optimizers = prepared_optimizers
        # The windows of a loader are dropped with it.
        self._by_loader: weakref.WeakKeyDictionary[Any, dict[Models, Window]] = weakref.WeakKeyDictionary()
        self._latest_loader: Callable[[], Any] = _no_loader
        self._latest_windows: dict[Models, Window] = {}
        self._without_loader: dict[Models, Window] = {}
        self._checked: set[Models] = set()
        self.current: Window | None = None
        self.count: int = 0
        """Micro batches since the start, or since the one that ended a loader, which is counted as 0."""
        self.has_accumulated: bool = False
        """Whether there may be open windows."""
        self.elastic: ElasticSteps | None = None
        """Follows elastic loaders and those of replicas, whose micro batches make a step without windows, or None."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_by_loader": dict(self._by_loader), "_latest_loader": None, "_latest_windows": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._by_loader = weakref.WeakKeyDictionary(state["_by_loader"])
        self._forget_latest()

    def follow_elastic_loaders(self, loaders: DataLoaderConfiguration, deterministic: bool) -> None:
        """Make steps of the micro batches of elastic loaders, or those of replicas.

        Raises:
            ConfigurationError: the settings contradict each other, or the strategy has steps of its own.
        """
        strategy = self.strategy
        if deterministic and not loaders.elastic:
            raise ConfigurationError(
                "deterministic_reduction=True needs elastic loaders, whose logical shards it adds up: pass "
                "dataloader_config=DataLoaderConfiguration(elastic=True)."
            )
        if loaders.elastic and not strategy.supports_elastic:
            raise ConfigurationError(
                f"DataLoaderConfiguration(elastic=True) makes one step of several micro batches, and "
                f"{type(strategy).__name__} has steps of its own. Use one process, DDP, FSDP 1 or FSDP 2."
            )
        reduction = strategy.reduce_in_order() if deterministic or strategy.replicas else None
        self.elastic = ElasticSteps(strategy, self.gradient_state, self._prepared_models, self, reduction)
        self.elastic.in_one_thread = deterministic and self.process.device.type == "cpu"

    def forget(self) -> None:
        if self.elastic is not None:
            self.elastic.drop()
        self._by_loader.clear()
        self._forget_latest()
        self._without_loader.clear()
        self._checked.clear()
        self.current = None

    def windows_of(self, loader: Any) -> list[Window]:
        """Return the open windows of a loader; with None those without a loader."""
        return list((self._without_loader if loader is None else self._by_loader.get(_origin(loader), {})).values())

    def windows_by_loader(self) -> list[tuple[Any, list[Window]]]:
        """Return the loaders with open windows, and the windows."""
        return [(loader, list(windows.values())) for loader, windows in self._by_loader.items() if windows]

    def add_window(self, loader: Any, window: Window) -> None:
        """Add a window of a loaded state; the next step of its loader (None for no loader) continues it."""
        windows = self._without_loader if loader is None else self._windows_of(loader)
        windows[window.models] = window
        self.has_accumulated = True

    def discard(self, optimizer: AcceleratedOptimizer) -> bool:
        """Discard the windows that left loops have open, with their gradients, for ``zero_grad`` between loops.

        Returns:
            Whether there was a window of a model that the optimizer updates.
        """
        if self.gradient_state.in_dataloader or not self.plugin.sync_with_dataloader:
            return False
        left = [windows for loader, windows in self._by_loader.items() if getattr(loader, "has_been_left", False)]
        found = False
        for windows in left:
            for models in list(windows):
                if any(self.strategy.updates(optimizer, model) for model in models):
                    del windows[models]
                    for model in models:
                        self.strategy.gradients.drop(model)
                    found = True
        return found

    def set_num_steps(self, num_steps: int) -> None:
        self.plugin = replace(self.plugin, num_steps=num_steps)
        self.num_steps = num_steps
        GradientState(self.plugin)

    def set_count(self, count: int) -> None:
        """Set :attr:`count`, and so the place in the current window, or in every open window between two steps."""
        self.count, position = count, count % self.num_steps
        windows = [window for _, of_loader in self.windows_by_loader() for window in of_loader]
        for window in [self.current] if self.current is not None else [*windows, *self._without_loader.values()]:
            window.position = position

    def step(self, models: Models, loader: Any = None) -> AccumulationStep:
        """Return one micro batch's context, for these models or all prepared ones, in the window of ``loader``."""
        if models and (type(models[0]).__hash__ is None or models not in self._checked):
            self._check_models(models)
        return AccumulationStep(self, models or tuple(self._prepared_models), loader)

    def _check_models(self, models: Models) -> None:
        """Check the arguments of ``accumulate``, once for each combination."""
        for model in models:
            check_type(model, nn.Module, "accumulate", "Pass prepared models one by one, or nothing for all of them.")
            is_prepared = any(model is prepared for prepared in self._prepared_models)
            if not is_prepared and self.process.num_processes > 1 and not hasattr(model, PREPARED):
                warn_once(
                    __name__,
                    f"accumulate got a {type(model).__name__} that prepare() did not return: its gradients are not "
                    "synchronised at the end of the window. Pass what prepare() returned.",
                )
        self._checked.add(models)

    def begin_step(self, models: Models, of_loader: Any = None) -> bool:
        """Count a micro batch, and return whether it ends its window: that of a loader, or of the current one."""
        state = self.gradient_state
        state.batch_used = True
        if self.elastic is not None and self.elastic.shard is not None:
            return self.elastic.shard.ends_step
        self.count += 1
        if self.num_steps == 1 and not self.has_accumulated:
            # The fast path of loops that never accumulate.
            self.current = Window(models, 1, 1)
            state.sync_gradients = True
            return True
        self.has_accumulated = True
        several = of_loader is not None or state.has_several_dataloaders
        loader = self._loader_of_step(models, of_loader) if several else state.active_dataloader
        if loader is None:
            # A loop that fetches its batches inside the context has no loader yet where it begins.
            windows = self._latest_windows if models in self._latest_windows else self._without_loader
        else:
            windows = self._latest_windows if self._latest_loader() is loader else self._windows_of(loader)
        window = windows.get(models)
        if window is None:
            # The open window of a loader whose loop is over: its gradients are still in the models.
            for other, left in self._by_loader.items():
                if models in left and isinstance(other, PreparedLoader) and other.has_been_left:
                    window = left.pop(models)
                    break
            window = windows[models] = window or Window(models, self.num_steps)
        window.position += 1
        if window.position > 1:
            window.with_gradient = next((one for one in window.parameters if one.grad is not None), None)
        self.current = window
        at_end = loader is not None and loader.end_of_dataloader and self.plugin.sync_with_dataloader
        sync = window.position >= window.divisor
        if several:
            at_end = self._ends_with(loader, of_loader, sync)
        if at_end:
            self.count = 0
        sync = at_end or sync
        if sync:
            del windows[models]
            if window.position < window.divisor:  # the window is shorter than expected
                if not window.by_items and window.position > 1:
                    self.strategy.scale_gradients(window.parameters, window.divisor / window.position)
                window.divisor = window.position
        state.sync_gradients = sync
        state.micro_batch = MicroBatch(window.position, bool(sync))
        return bool(sync)

    def _loader_of_step(self, models: Models, of_loader: Any) -> Any:
        """Return the loader whose window a micro batch belongs to, while several are open or if the caller names it."""
        state = self.gradient_state
        loaders = state.step_dataloaders
        leader = next(iter(loaders), None)
        if of_loader is not None:
            found = open_loader(of_loader, state, "accumulate")
            leader = of_loader if found is None else found
        if leader is not None and models not in self._windows_of(leader):
            # In the first step of a loop over several loaders, only the last of them is known: the window continues.
            of_loaders = (self._by_loader.get(_origin(one), {}) for one in loaders)
            begun = next((windows for windows in of_loaders if models in windows), None)
            if begun is not None:
                self._windows_of(leader)[models] = begun.pop(models)
        return leader

    def _ends_with(self, loader: Any, of_loader: Any, is_full: bool) -> bool:
        """Return True if a window ends because its loader does, while several are open or if the caller names it."""
        state = self.gradient_state
        if loader is None or not self.plugin.sync_with_dataloader:
            return False
        if of_loader is not None:
            return bool(loader.end_of_dataloader) and loader in state.dataloader_references
        ends = [bool(one.end_of_dataloader) for one in state.step_dataloaders]
        if any(ends) and not all(ends) and not is_full:
            warn_once(
                __name__,
                "a step with batches of several loaders is the last of one of them, and the others continue. The "
                "accumulation window ends with the loader whose batch comes first. If another one ends the loop, pass "
                "it: accumulate(model, loader=loader).",
            )
        return bool(loader.end_of_dataloader)

    def end_step(self, models: Models, window: Window | None) -> None:
        """Leave the context of a micro batch. A window that began before its loader belongs to the loader now."""
        state = self.gradient_state
        self.current = state.micro_batch = None
        state.batch_used = True
        if window is None:
            return
        window.with_gradient = None
        if self._without_loader and self._without_loader.get(models) is window:
            loader = next(iter(state.step_dataloaders), None)
            if loader is not None:
                del self._without_loader[models]
                self._windows_of(loader).setdefault(models, window)

    def _windows_of(self, loader: Any) -> dict[Models, Window]:
        """Return the windows of a loader, which the next step then finds without a lookup.

        A loader that ``skip_first_batches`` made continues those of its origin, such as the windows of a loaded state.
        """
        self._latest_windows = self._by_loader.setdefault(_origin(loader), {})
        self._latest_loader = weakref.ref(loader, self._forget_latest)
        return self._latest_windows

    def _forget_latest(self, _: Any = None) -> None:
        self._latest_loader, self._latest_windows = _no_loader, {}

    def count_backward(self, batch: MicroBatch) -> None:
        """Count a backward pass of the current micro batch; see ``AcceleratedOptimizer.zero_grad``."""
        kept = None if batch.backwards or self.current is None else self.current.with_gradient
        if kept is not None and kept.grad is None:
            warn_once(
                __name__,
                "gradients that were accumulated are gone: model.zero_grad(), or zero_grad() of an optimizer that "
                "prepare() did not return, was called in accumulate(). Call zero_grad() of the prepared optimizer "
                "instead, which keeps them until a step has used them.",
            )
        if batch.closes and not batch.backwards and len(self._prepared_optimizers) > 1:
            for optimizer in self._prepared_optimizers:
                if isinstance(optimizer, AcceleratedOptimizer):  # else a library has prepared it
                    optimizer.note_gradients()
        batch.backwards += 1

    def weigh(self, loss: torch.Tensor) -> torch.Tensor:
        divisor = self.num_steps
        if self.current is not None:
            self.current.expect(by_items=False)
            divisor = self.current.divisor
        return loss if divisor == 1 else loss / divisor

    def weigh_items(self, loss: torch.Tensor, num_items: int | torch.Tensor, reduction: ItemReduction) -> torch.Tensor:
        """Return the loss, scaled so that every item of the window, on all ranks, has the same weight."""
        if reduction not in ("mean", "sum"):
            raise ConfigurationError(
                f"reduction={reduction!r} is not one of 'mean', 'sum'. It is how the loss was computed from its items."
            )
        self.strategy.check_item_reduction(reduction)
        if not isinstance(num_items, torch.Tensor):
            num_items = int(check_number("num_items", num_items, at_least=0, whole=True))
        elif num_items.numel() != 1:
            raise ConfigurationError(f"num_items of shape {tuple(num_items.shape)} must be one number of items.")
        sum_of_items = loss * num_items if reduction == "mean" else loss
        window = self.current or Window(models=(), divisor=1, position=1)
        window.expect(by_items=True)
        has_gradients = window.position > 1 or window.normaliser is not None
        window.count(num_items)
        if not self.gradient_state.sync_gradients:
            return sum_of_items
        # float64 is exact to 2**53 items a window; on devices without it, float32 to 2**24.
        dtype = torch.float64 if self.process.device.type == "cpu" else torch.float32
        items = torch.as_tensor(window.items, dtype=dtype).detach().clone().to(self.process.device)
        everyone = self.strategy.averaging_collectives
        # A window without items has zero gradients, which must not be divided by zero.
        total = everyone.all_reduce(items).clamp_(min=1).float()
        # Gradients of sums were accumulated as they are, and synchronising averages over the ranks.
        normaliser = total / everyone.world_size
        if has_gradients:
            self.strategy.scale_gradients(
                window.parameters, (1.0 if window.normaliser is None else window.normaliser) / normaliser
            )
        window.normaliser = normaliser
        return sum_of_items / normaliser


class AccumulationStep:
    """The context of one micro batch; a class rather than a generator, because every training step makes one."""

    __slots__ = ("_accumulation", "_loader", "_models", "_stack", "_window")

    def __init__(self, accumulation: Accumulation, models: Models, loader: Any = None) -> None:
        self._accumulation = accumulation
        self._models = models
        self._loader = loader
        self._stack: ExitStack | None = None
        self._window: Window | None = None

    def __enter__(self) -> None:
        accumulation = self._accumulation
        sync = accumulation.begin_step(self._models, self._loader) or accumulation.plugin.sync_each_batch
        self._window = accumulation.current
        if not sync and accumulation._skips_sync is not None:
            self._stack = ExitStack()
            for model in self._models:
                self._stack.enter_context(accumulation._skips_sync.no_sync(model))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._accumulation.end_step(self._models, self._window)
        if self._stack is not None:
            self._stack.__exit__(kind, error, trace)
        if error is not None:
            explained = self._accumulation.strategy.explain(error)
            if explained is not None:
                raise explained from error

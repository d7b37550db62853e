"""Makes one optimizer step of the micro batches that an elastic loader yields.

With ``deterministic_reduction``, and with replicas that may be killed (strategy "ft"), a :class:`ShardReduction` adds
the gradients, so that their sum has the same bits on any number of processes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn

from accel_data import ElasticLoader, LogicalShard
from accel_state import GradientState
from accel_state.collectives.single import Collectives
from accel_state.errors import ConfigurationError

from .shard_reduction import OUTSIDE, ShardReduction


def _no_loader() -> None:
    """Return None, as a weak reference to a loader that was collected."""


class ElasticSteps:
    """Follows the micro batches of the elastic loaders of an Accelerator.

    Args:
        strategy: that of the Accelerator.
        gradient_state: likewise.
        models: the prepared models, those that will be prepared included.
        settings: the object with the settings of gradient accumulation: ``num_steps`` and ``plugin``.
        reduction: see below.

    Attributes:
        reduction: how gradients are reduced deterministically; None leaves it to the strategy.
        in_one_thread: whether kernels on the CPU compute in one thread, from the first loader on: they divide their
            sums among the threads, of which launchers start more for fewer processes.
    """

    def __init__(
        self,
        strategy: Any,
        gradient_state: GradientState,
        models: Sequence[nn.Module],
        settings: Any,
        reduction: ShardReduction | None,
    ) -> None:
        self.strategy = strategy
        self.gradient_state = gradient_state
        self.models = models
        self.reduction = reduction
        self.in_one_thread = False
        self._settings = settings
        self._shard: LogicalShard | None = None
        self._loader: Callable[[], Any] = _no_loader
        self._open_loader: Callable[[], Any] = _no_loader  # whose step has gradients and is not complete
        self._stack = ExitStack()
        self._calls = 0  # backward passes in this micro batch so far
        self._items: float | torch.Tensor = 0
        self._by_items: bool | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_loader": _no_loader, "_open_loader": _no_loader, "_stack": ExitStack()}

    @property
    def shard(self) -> LogicalShard | None:
        """The logical shard of the current batch; None outside of loops over elastic loaders."""
        loader = self.gradient_state.active_dataloader
        return self._shard if loader is not None and self._loader() is loader else None

    def follow(self, loader: ElasticLoader) -> None:
        """Follow a prepared loader."""
        loader.listener = self
        if self.in_one_thread:
            torch.set_num_threads(1)

    def begin(self, loader: ElasticLoader, shard: LogicalShard, again: bool) -> None:
        """Prepare for the micro batch of a shard."""
        steps = self._settings.num_steps
        if steps != loader.plan.window:
            raise ConfigurationError(
                f"gradient_accumulation_steps={steps} cannot be combined with an elastic loader, which divides its "
                "global batches into micro batches already. Use 1, and make the loader's batch_size and logical_shards "
                f"{steps} times as large."
            )
        self._shard, self._loader = shard, weakref.ref(loader)
        is_open = self._open_loader() is loader
        if not again and shard.slot == 0:
            if is_open:
                # The loop was left within a step, or a state was loaded.
                self.drop()
                is_open = False
            self._items, self._by_items = 0, None
        state = self.gradient_state
        state.sync_gradients, state.keeps_gradients = shard.ends_step, is_open
        self._stack.close()
        if not again:
            self._calls = 0
        if self.reduction is not None:
            if shard.slot == 0 and not again:
                self.reduction.remember_buffers(self.models)
        elif not (shard.ends_step or self._settings.plugin.sync_each_batch) and self.strategy.skips_gradient_sync:
            for model in self.models:
                self._stack.enter_context(self.strategy.no_sync(model))

    def end(self) -> None:
        """Note that the loop over an elastic loader has ended."""
        self._stack.close()
        self._shard, self._loader = None, _no_loader
        self.gradient_state.sync_gradients, self.gradient_state.keeps_gradients = True, None

    def drop(self) -> None:
        """Discard the gradients of a step that is not complete."""
        if self._open_loader() is None:
            return
        self._open_loader = _no_loader
        if self.reduction is not None:
            self.reduction.forget()
        for model in self.models:
            self.strategy.gradients.drop(model)

    def backward(
        self, loss: torch.Tensor, num_items: Any, reduction: str, scale: Callable[[Any], Any] | None, **kwargs: Any
    ) -> bool:
        """Run the backward pass of a micro batch of an elastic loader; returns False for any other batch.

        Args:
            loss: the loss of the micro batch.
            num_items: items in the loss; None weights every sample of the step alike.
            reduction: whether the loss is the "mean" or the "sum" of the items.
            scale: applies the loss scale of fp16, if there is one.
            **kwargs: for ``torch.Tensor.backward``.

        Raises:
            ConfigurationError: gradients would not be reduced, or not in the order of the logical shards.
        """
        shard = self.shard
        if shard is None:
            if self.reduction is not None:
                raise ConfigurationError(OUTSIDE)
            return False
        if "learning_rate" in kwargs:
            raise ConfigurationError(
                "optimizers that update in the backward pass (backward(learning_rate=...)) cannot be combined with "
                "elastic loaders or --ft, whose step consists of several backward passes."
            )
        if self._calls and shard.batches > 1:
            raise ConfigurationError(
                "backward was called twice for a batch, which cannot be combined with gradient accumulation over "
                "replicas. Add the losses: accelerator.backward(loss_1 + loss_2)."
            )
        if self.reduction is not None:
            self.reduction.enter(self.models, shard, self._calls)
            self.reduction.scale = None
        weighted = self._weighted(loss, shard) if num_items is None else self._summed(loss, num_items, reduction, shard)
        scaled = weighted if scale is None else scale(weighted)
        run = partial(self.strategy.backward, scaled, in_window=False, **kwargs)
        if self.reduction is None:
            run()
        else:
            self.reduction.backward(run)
        self._calls += 1
        self._open_loader = _no_loader if shard.ends_step else self._loader
        self.gradient_state.keeps_gradients = not shard.ends_step
        return True

    @property
    def _averaging(self) -> Collectives:
        collectives: Collectives = self.strategy.averaging_collectives
        return collectives

    def _expect(self, by_items: bool) -> None:
        if self._by_items not in (None, by_items):
            raise ConfigurationError(
                "this step has losses with num_items and losses without, which cannot be combined. Pass num_items to "
                "every backward of a step, or to none."
            )
        self._by_items = by_items

    def _weighted(self, loss: torch.Tensor, shard: LogicalShard) -> torch.Tensor:
        self._expect(by_items=False)
        if self.reduction is not None:
            # The gradients of a shard that another rank computes are left out.
            return loss * (shard.weight * self.reduction.averaging.world_size) if shard.weight else loss
        # The strategy averages over the ranks.
        return loss * (shard.weight * self._averaging.world_size)

    def _summed(self, loss: torch.Tensor, num_items: Any, reduction: str, shard: LogicalShard) -> torch.Tensor:
        if reduction not in ("mean", "sum"):
            raise ConfigurationError(
                f"reduction={reduction!r} is not one of 'mean', 'sum'. It is how the loss was computed from its items."
            )
        self._expect(by_items=True)
        if self._calls:
            raise ConfigurationError(
                "num_items was passed to two backward passes of one batch of an elastic loader. Add the losses, and "
                "call backward once."
            )
        total = loss * num_items if reduction == "mean" else loss
        counts = bool(shard.weight)
        if self.reduction is not None and self.reduction.reduces_parameters:
            self.reduction.items = (self.reduction.items or 0) + num_items
            return total
        if counts:
            self._items = self._items + num_items
        if shard.ends_step:
            device = self.strategy.state.device
            dtype = torch.float64 if device.type == "cpu" else torch.float32
            items = torch.as_tensor(self._items, dtype=dtype).detach().clone().to(device)
            factor = (1 / self._averaging.all_reduce(items).clamp_(min=1)).float()
            if self.reduction is not None:
                self.reduction.scale = factor
                return total
            # What was accumulated so far is synchronised together with this micro batch.
            factor = factor * self._averaging.world_size
            self.strategy.scale_gradients(
                (parameter for model in self.models for parameter in model.parameters()), factor
            )
            return total * factor if counts else total * 0
        return total if counts or self.reduction is not None else total * 0

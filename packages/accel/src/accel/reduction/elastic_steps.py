"""Makes one optimizer step of the micro batches that an elastic loader yields.

With ``deterministic_reduction`` the gradients of the logical shards are kept apart and added in an order that depends
on their number only (:mod:`accel.reduction.tree_sum`), so that the sum has the same bits on any number of processes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from accel_data import ElasticLoader, LogicalShard
from accel_state import GradientState
from accel_state.collectives.single import Collectives
from accel_state.errors import ConfigurationError

from ..core.local_part import local
from .tree_sum import TreeSum, keys_of_rank

# Elements that are exchanged at a time: 64 MiB of fp32.
_SEGMENT = 1 << 24


class ShardReduction:
    """Adds the gradients of logical shards, and what they have added to floating point buffers, in a fixed order.

    Args:
        collectives: of the ranks that compute different shards.
        reduces_parameters: False where the strategy reduces the gradients itself (:class:`OrderedReduceScatter`), so
            that only buffers are left.
    """

    def __init__(self, collectives: Collectives, reduces_parameters: bool = True) -> None:
        self.collectives = collectives
        self.reduces_parameters = reduces_parameters
        self.shard: LogicalShard | None = None
        self.scale: torch.Tensor | None = None  # what the sum of a step is multiplied by
        self.calls = 0  # backward passes in this micro batch before the current one
        self._trees: dict[int, TreeSum] = {}  # by backward pass within the micro batch
        self._parameters: list[torch.Tensor] = []
        self._buffers: list[torch.Tensor] = []
        self._before: list[torch.Tensor] = []  # values of the buffers at the start of the step
        # Of the vector that a shard's gradients and changes of buffers are packed into.
        self._size, self._dtype, self._device = 0, torch.float32, torch.device("cpu")

    def remember_buffers(self, models: Sequence[nn.Module]) -> None:
        """Take the values of the buffers as those at the start of a step."""
        if self._trees:
            return  # within a step of another loop
        self._buffers = list(dict.fromkeys(buffer for model in models for buffer in model.buffers()))
        self._before = [buffer.detach().clone() for buffer in self._buffers]

    def enter(self, models: Sequence[nn.Module], shard: LogicalShard, calls: int) -> None:
        """Begin a backward pass, the ``calls``-th of the micro batch of a shard."""
        self.shard, self.calls = shard, calls
        if shard.slot or calls:
            return
        self.forget()
        if self.reduces_parameters:
            trainable = (item for model in models for item in model.parameters() if item.requires_grad)
            self._parameters = list(dict.fromkeys(trainable))
        self._lay_out()

    def forget(self) -> None:
        """Discard the gradients of a step that is not complete."""
        self._trees.clear()

    def backward(self, run: Callable[[], None]) -> None:
        """Run a backward pass, and add its gradients. After the last micro batch of a step, ``grad`` is their sum."""
        shard = self.shard
        assert shard is not None
        parameters = self._parameters
        former = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        run()
        gradients = [parameter.grad for parameter in parameters]
        if parameters or self._buffers:
            tree = self._trees.setdefault(self.calls, TreeSum(shard.count))
            if shard.weight:
                tree.add(shard.index, self._packed(gradients, shard.weight))
            self._restore_buffers(floating_only=shard.ends_step)
            if shard.ends_step:
                total = self._exchange(self._trees.pop(self.calls), shard.count)
                self._unpack(total, former)
        if not shard.ends_step:
            for parameter, gradient in zip(parameters, former, strict=True):
                parameter.grad = gradient

    def _floating(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        pairs = zip(self._buffers, self._before, strict=True)
        return [(buffer, before) for buffer, before in pairs if buffer.is_floating_point()]

    def _restore_buffers(self, floating_only: bool) -> None:
        # Every shard begins with the buffers of the step's start. Counters, such as BatchNorm's, advance once a step.
        for buffer, before in zip(self._buffers, self._before, strict=True):
            if buffer.is_floating_point() or not floating_only:
                buffer.copy_(before)

    def _lay_out(self) -> None:
        tensors = [*self._parameters, *(buffer for buffer, _ in self._floating())]
        devices = {tensor.device for tensor in tensors}
        if len(devices) > 1:
            raise ConfigurationError(
                f"deterministic_reduction needs models on one device for each process, and these are on "
                f"{', '.join(sorted(map(str, devices)))}. Put them on one device, or turn it off."
            )
        self._device = next(iter(devices), torch.device("cpu"))
        self._dtype = reduce(torch.promote_types, {tensor.dtype for tensor in tensors}, torch.float32)
        used = sum(tensor.numel() for tensor in tensors) + len(self._parameters)
        world = self.collectives.world_size
        self._size = -(-used // world) * world

    def _packed(self, gradients: Sequence[torch.Tensor | None], weight: float) -> torch.Tensor:
        """One vector of the gradients, the changes of the buffers, and whether each parameter has a gradient."""
        vector = self._empty_vector()
        offset = 0
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            part = vector[offset : offset + parameter.numel()]
            offset += parameter.numel()
            if gradient is None:
                part.zero_()
            else:
                own = local(gradient)
                part.copy_((own.to_dense() if own.is_sparse else own).reshape(-1))
        for buffer, before in self._floating():
            part = vector[offset : offset + buffer.numel()]
            offset += buffer.numel()
            part.copy_(((buffer.detach() - before) * weight).reshape(-1))
        present = [float(gradient is not None) for gradient in gradients]
        vector[offset:].zero_()
        vector[offset : offset + len(present)] = torch.tensor(present, dtype=self._dtype)
        return vector

    def _empty_vector(self) -> torch.Tensor:
        return torch.empty(self._size, dtype=self._dtype, device=self._device)

    def _unpack(self, total: torch.Tensor, former: Sequence[torch.Tensor | None]) -> None:
        """Set gradients, added to those of earlier backward passes of this micro batch, and buffers."""
        sizes = [parameter.numel() for parameter in self._parameters]
        sizes += [buffer.numel() for buffer, _ in self._floating()]
        parts = total[: sum(sizes)].split(sizes) if sizes else ()
        count = len(self._parameters)
        present = total[sum(sizes) : sum(sizes) + count].tolist()
        if self.scale is not None and count:
            total[: sum(sizes[:count])].mul_(self.scale.to(total.dtype))
        for number, parameter in enumerate(self._parameters):
            gradient = former[number]
            if present[number]:
                summed = parts[number].view(local(parameter).shape).to(parameter.dtype)
                gradient = self._as_gradient(parameter, summed) if gradient is None else gradient.add_(summed)
            parameter.grad = gradient
        for (buffer, before), change in zip(self._floating(), parts[count:], strict=True):
            buffer.add_(change.view(buffer.shape).to(buffer.dtype))
            before.copy_(buffer)

    def _as_gradient(self, parameter: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        if local(parameter) is parameter:
            return values
        sharded: Any = parameter
        return type(sharded).from_local(values, sharded.device_mesh, sharded.placements)

    def _exchange(self, tree: TreeSum, count: int) -> torch.Tensor:
        """The sum over all shards. Each rank adds up one part of the vector, and sends it to the others."""
        collectives = self.collectives
        world = collectives.world_size
        if world == 1:
            total: torch.Tensor = tree.total()
            return total
        held = [vector for _, vector in tree.items()]
        keys = [keys_of_rank(count, world, rank) for rank in range(world)]
        total = held[0] if held else self._empty_vector()
        size, step = self._size, max(1, _SEGMENT // world) * world
        for begin in range(0, size, step):
            part = min(step, size - begin) // world
            # To each rank its part of every vector that is held here.
            stacked = [vector[begin : begin + part * world].view(world, 1, part) for vector in held]
            sent = (
                stacked[0].reshape(-1)
                if len(stacked) == 1
                else torch.cat([total.new_empty(world, 0, part), *stacked], 1)
            )
            received = collectives.all_to_all(sent.view(-1), [part * len(of_rank) for of_rank in keys])
            pieces = iter(received.split(part))
            own = TreeSum(count)
            for key, piece in sorted((key, next(pieces)) for of_rank in keys for key in of_rank):
                own.insert(key, piece)
            total[begin : begin + part * world] = collectives.all_gather(own.total()).view(-1)
        return total


class OrderedReduceScatter:
    """The reduce-scatter of one FSDP 2 unit: adds the gradients of logical shards in the order of a TreeSum.

    Each rank gets its part of the gradients of all ranks, and adds these up. Only the last micro batch of a step
    returns the sum; the others return zeros.
    """

    def __init__(self, reduction: ShardReduction) -> None:
        self.reduction = reduction
        self._trees: dict[int, TreeSum] = {}
        self._latest: LogicalShard | None = None
        self._calls = 0

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A buffer for torch to fill."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        shard = self.reduction.shard
        if shard is None:
            raise ConfigurationError(OUTSIDE)
        self._calls = self._calls + 1 if shard is self._latest else 0
        self._latest = shard
        if shard.slot == 0 and self._calls == 0:
            self._trees.clear()
        tree = self._trees.setdefault(self._calls, TreeSum(shard.count))
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        first = shard.slot * group.size()
        for rank, gradient in enumerate(received.view(group.size(), -1)[: shard.count - first]):
            tree.add(first + rank, gradient.clone())
        if not shard.ends_step:
            output_tensor.zero_()
            return
        output_tensor.copy_(self._trees.pop(self._calls).total())
        if self.reduction.scale is not None:
            output_tensor.mul_(self.reduction.scale.to(output_tensor.dtype))


OUTSIDE = (
    "deterministic_reduction=True reduces gradients over the logical shards of a prepared elastic loader, but backward "
    "was called outside of a loop over one. Compute the loss from batches of a prepared loader (for gradients that are "
    "not reduced, call loss.backward())."
)


def _no_loader() -> None:
    """The weak reference to a loader that was collected."""


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

    def begin(self, loader: ElasticLoader, shard: LogicalShard, again: bool) -> None:
        """Prepare for the micro batch of a shard."""
        steps = self._settings.num_steps
        if steps != 1:
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
        """The loop over an elastic loader has ended."""
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
            self.strategy.drop_gradients(model)

    def backward(
        self, loss: torch.Tensor, num_items: Any, reduction: str, scale: Callable[[Any], Any] | None, **kwargs: Any
    ) -> None:
        """Run the backward pass of a micro batch.

        Args:
            loss: the loss of the micro batch.
            num_items: items in the loss; None weights every sample of the step alike.
            reduction: whether the loss is the "mean" or the "sum" of the items.
            scale: applies the loss scale of fp16, if there is one.
            **kwargs: for ``torch.Tensor.backward``.
        """
        shard = self.shard
        assert shard is not None
        if self.reduction is not None:
            self.reduction.enter(self.models, shard, self._calls)
            self.reduction.scale = None
        weighted = self._weighted(loss, shard) if num_items is None else self._summed(loss, num_items, reduction, shard)
        scaled = weighted if scale is None else scale(weighted)
        if self.reduction is None:
            scaled.backward(**kwargs)
        else:
            self.reduction.backward(lambda: scaled.backward(**kwargs))
        self._calls += 1
        self._open_loader = _no_loader if shard.ends_step else self._loader
        self.gradient_state.keeps_gradients = not shard.ends_step

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
            return loss * shard.weight if shard.weight else loss
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
        if counts:
            self._items = self._items + num_items
        if shard.ends_step:
            factor = self._per_item()
            if self.reduction is not None:
                self.reduction.scale = factor
                return total
            # What was accumulated so far is synchronised together with this micro batch.
            factor = factor * self._averaging.world_size
            self.strategy.scale_gradients(self._trainable(), factor)
            return total * factor if counts else total * 0
        return total if counts or self.reduction is not None else total * 0

    def _per_item(self) -> torch.Tensor:
        device = self.strategy.state.device
        dtype = torch.float64 if device.type == "cpu" else torch.float32
        items = torch.as_tensor(self._items, dtype=dtype).detach().clone().to(device)
        return (1 / self._averaging.all_reduce(items).clamp_(min=1)).float()

    def _trainable(self) -> Iterable[torch.Tensor]:
        return (parameter for model in self.models for parameter in model.parameters())

"""The sum of the gradients of logical shards, in an order that depends on the number of shards only.

See :mod:`accel.reduction.tree_sum` for the order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from accel_data import LogicalShard
from accel_state.collectives.single import Collectives
from accel_state.errors import ConfigurationError

from ..core.local_part import local
from .tree_sum import TreeSum, keys_of_rank

# Elements that are exchanged at a time: 64 MiB of fp32.
_SEGMENT = 1 << 24
# Facts about a shard other than those about its parameters: whether its losses have num_items, and how many in two
# parts, whose sums over all shards are exact in fp32 to 2**36 items.
_FACTS = 3
_ITEMS_PART = 4096


OUTSIDE = (
    "gradients are reduced over the logical shards of a prepared loader (deterministic_reduction=True, --ft), but "
    "backward was called outside of a loop over one. Compute the loss from batches of a prepared elastic loader, or "
    "under --ft of a prepared loader with the model in training mode: model.train(); its data set needs a length, and "
    "a SequentialSampler or a RandomSampler without replacement (shuffle=True). For gradients that are not reduced, "
    "call loss.backward()."
)


class ShardReduction:
    """Adds the gradients of logical shards, and what they have added to floating point buffers, in a fixed order.

    Args:
        collectives: of the ranks that compute different shards. They may be replaced between two steps.
        reduces_parameters: False where the strategy reduces the gradients itself (:class:`OrderedReduceScatter`), so
            that only buffers are left.
        averaging: of the ranks over which the strategy averages the gradients of a micro batch before they are added
            here, such as the processes of a sharded replica: these ranks compute as many consecutive shards.

    Attributes:
        is_complete: whether the gradients are those of the whole step.
    """

    def __init__(
        self, collectives: Collectives, reduces_parameters: bool = True, averaging: Collectives | None = None
    ) -> None:
        self.collectives = collectives
        self.reduces_parameters = reduces_parameters
        self.averaging: Collectives = averaging or Collectives()
        self.shard: LogicalShard | None = None
        self.scale: torch.Tensor | None = None  # what an OrderedReduceScatter multiplies the sum of a step by
        self.items: float | torch.Tensor | None = None  # of the current shard's losses; None if none has num_items
        self.calls: int = 0  # backward passes in this micro batch before the current one
        self.is_complete: bool = False
        self._trees: dict[int, TreeSum] = {}  # by backward pass within the micro batch
        self._parameters: list[torch.Tensor] = []
        self._former: list[torch.Tensor | None] = []  # gradients from before the current shard
        self._buffers: list[torch.Tensor] = []
        # Values of the buffers at the start of the step, and those that the next shard begins with.
        self._start: list[torch.Tensor] = []
        self._before: list[torch.Tensor] = []
        # Of the vector that a shard's gradients and changes of buffers are packed into.
        self._size, self._dtype, self._device = 0, torch.float32, torch.device("cpu")

    def remember_buffers(self, models: Sequence[nn.Module]) -> None:
        """Take the values of the buffers as those at the start of a step."""
        self.is_complete = False
        if self._trees:
            return  # within a step of another loop
        self._buffers = list(dict.fromkeys(buffer for model in models for buffer in model.buffers()))
        self._start = [buffer.detach().clone() for buffer in self._buffers]
        self._before = list(self._start)

    def enter(self, models: Sequence[nn.Module], shard: LogicalShard, calls: int) -> None:
        """Begin a backward pass, the ``calls``-th of the micro batch of a shard."""
        self.shard, self.calls = shard, calls
        if shard.batch == 0:
            self.items = None
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

    @torch.no_grad()
    def undo(self) -> None:
        """Discard a step: no parameter has a gradient, and the buffers have the values of its start."""
        self.forget()
        for parameter in self._parameters:
            parameter.grad = None
        for buffer, value in zip(self._buffers, self._start, strict=True):
            buffer.copy_(value)

    def backward(self, run: Callable[[], None]) -> None:
        """Run a backward pass, and add its gradients. After the last micro batch of a step, ``grad`` is their sum."""
        shard = self.shard
        assert shard is not None
        parameters = self._parameters
        if shard.batch == 0:
            self._former = [parameter.grad for parameter in parameters]
            for parameter in parameters:
                parameter.grad = None
        run()
        if not shard.ends_shard:
            return
        if parameters or self._buffers:
            count = shard.count // self.averaging.world_size
            tree = self._trees.setdefault(self.calls, TreeSum(count))
            if shard.weight:
                weight = shard.weight * shard.batches * self.averaging.world_size
                tree.add(shard.index // self.averaging.world_size, self._packed(weight))
            # Every shard begins with the buffers of the step's start. Counters, such as BatchNorm's, advance once a
            # step.
            for buffer, before in zip(self._buffers, self._before, strict=True):
                if buffer.is_floating_point() or not shard.ends_step:
                    buffer.copy_(before)
            if shard.ends_step:
                self._unpack(self._exchange(self._trees.pop(self.calls), count), count)
        if shard.ends_step:
            self.is_complete = True
            return
        for parameter, gradient in zip(parameters, self._former, strict=True):
            parameter.grad = gradient

    def _floating(self) -> list[tuple[torch.Tensor, int]]:
        """Return the floating point buffers, with their numbers among all buffers."""
        return [(buffer, number) for number, buffer in enumerate(self._buffers) if buffer.is_floating_point()]

    def _lay_out(self) -> None:
        tensors = [*self._parameters, *(buffer for buffer, _ in self._floating())]
        devices = {tensor.device for tensor in tensors}
        if len(devices) > 1:
            raise ConfigurationError(
                f"gradients are added in a fixed order (deterministic_reduction, --ft), which needs models on one "
                f"device for each process, and these are on {', '.join(sorted(map(str, devices)))}. Put them on one."
            )
        self._device = next(iter(devices), torch.device("cpu"))
        self._dtype = reduce(torch.promote_types, {tensor.dtype for tensor in tensors}, torch.float32)
        used = sum(local(tensor).numel() for tensor in tensors) + len(self._parameters) + _FACTS
        world = self.collectives.world_size
        self._size = -(-used // world) * world

    def _packed(self, weight: float) -> torch.Tensor:
        """Return one vector of a shard's gradients, the changes of the buffers, and facts about them.

        The facts are whether each parameter has a gradient, whether the losses were weighted by items, and how many.
        """
        pieces = []
        for parameter in self._parameters:
            if parameter.grad is None:
                pieces.append(torch.zeros(local(parameter).numel(), dtype=self._dtype, device=self._device))
                continue
            gradient = local(parameter.grad)
            pieces.append((gradient.to_dense() if gradient.is_sparse else gradient).reshape(-1).to(self._dtype))
        for buffer, number in self._floating():
            pieces.append(((buffer.detach() - self._before[number]) * weight).reshape(-1).to(self._dtype))
        present = [float(parameter.grad is not None) for parameter in self._parameters]
        facts = torch.tensor([*present, *[0.0] * _FACTS], dtype=self._dtype, device=self._device)
        if self.items is not None:
            given = self.items
            items = given.detach() if isinstance(given, torch.Tensor) else torch.tensor(given, dtype=torch.float64)
            facts[-3:] = torch.stack([items.new_ones(()), items // _ITEMS_PART, items % _ITEMS_PART])
        pieces.append(facts)
        vector = self._empty_vector()
        used = sum(piece.numel() for piece in pieces)
        torch.cat(pieces, out=vector[:used])
        vector[used:].zero_()
        return vector

    def _empty_vector(self) -> torch.Tensor:
        return torch.empty(self._size, dtype=self._dtype, device=self._device)

    def _unpack(self, total: torch.Tensor, count: int) -> None:
        """Set gradients, added to those of earlier backward passes of this micro batch, and buffers."""
        parameters, buffers = self._parameters, self._floating()
        sizes = [local(parameter).numel() for parameter in parameters]
        gradients = total[: sum(sizes)]
        sizes += [buffer.numel() for buffer, _ in buffers]
        used = sum(sizes)
        parts = total[:used].split(sizes) if sizes else ()
        *present, by_items, parts_of_items, rest = total[used : used + len(parameters) + _FACTS].tolist()
        if parameters and by_items:
            gradients.mul_(self._per_item(by_items, parts_of_items * _ITEMS_PART + rest, count).to(total))
        for parameter, is_present, former, part in zip(parameters, present, self._former, parts, strict=False):
            gradient = former
            if is_present:
                gradient = part.view(local(parameter).shape).to(parameter.dtype)
                if local(parameter) is not parameter:
                    sharded: Any = parameter
                    mesh, placements = sharded.device_mesh, sharded.placements
                    shape, stride = sharded.shape, sharded.stride()
                    gradient = type(sharded.data).from_local(
                        gradient, mesh, placements, run_check=False, shape=shape, stride=stride
                    )
                gradient = gradient if former is None else former.add_(gradient)
            parameter.grad = gradient
        for (buffer, number), change in zip(buffers, parts[len(parameters) :], strict=True):
            buffer.add_(change.view(buffer.shape).to(buffer.dtype))
            self._before[number] = buffer.detach().clone()

    def _per_item(self, by_items: float, items: float, count: int) -> torch.Tensor:
        """Return what turns gradients of the sum over all items into those of their mean."""
        world = self.averaging.world_size
        sums = self.averaging.all_reduce(torch.tensor([by_items, items], dtype=torch.float64))
        if sums[0].item() != count * world:
            raise ConfigurationError(
                f"{sums[0].item():.0f} of the {count * world} logical shards of a step have losses with num_items, and "
                "the others have losses without. Pass num_items to every backward of a step, or to none."
            )
        return (world / sums[1].clamp_(min=1)).float()

    def _exchange(self, tree: TreeSum, count: int) -> torch.Tensor:
        """Return the sum over all shards. Each rank adds up one part of the vector, and sends it to the others."""
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
            total[begin : begin + part * world].view(world, part).copy_(collectives.all_gather(own.total()))
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
        """Return a buffer for torch to fill."""
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

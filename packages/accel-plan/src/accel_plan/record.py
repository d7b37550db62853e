"""What a step sends and keeps: every collective with its bytes and its axis, and the memory that is alive."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

Layout = Sequence[tuple[str, int]]
"""Names and sizes of the axes that ranks are laid out along, the innermost last."""


@dataclass(frozen=True)
class Collective:
    """Collectives of one kind over one axis, in one step of one rank.

    Attributes:
        kind: "all-gather", "reduce-scatter", "all-reduce", "broadcast" or "all-to-all"; or what goes from one rank to
            one other: in a pipeline "activations" to the next stage, "gradients" of them to the one before, and "tied
            gradients" between the ends.
        axis: the axis of the mesh; several that were made one are joined by "+".
        ranks: how many take part.
        calls: how often.
        payload: bytes of whole results or inputs, over all calls.
        sent: bytes that this rank sends, over all calls, with :func:`sent_bytes`.
    """

    kind: str
    axis: str
    ranks: int
    calls: int
    payload: int
    sent: int


def sent_bytes(kind: str, payload: int, ranks: int) -> int:
    """Bytes that one rank sends in a collective that works round a ring, the least that is possible for large messages.

    With S the bytes of the whole and n ranks: an all-gather (S: the result) and a reduce-scatter (S: the input) send S
    (n-1)/n each; an all-reduce is both, 2 S (n-1)/n; an all-to-all keeps its own part, S (n-1)/n; a broadcast passes
    everything on once, S, and so does what goes to one other rank.
    Source: Patarasu and Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations, JPDC 69 (2009).
    """
    if ranks == 1:
        return 0
    if kind == "broadcast" or kind in POINT_TO_POINT:
        return payload
    return (2 if kind == "all-reduce" else 1) * payload * (ranks - 1) // ranks


SEND = "send"
"""From one rank to one other."""

POINT_TO_POINT = (SEND, "activations", "gradients", "tied gradients")
"""Kinds that two ranks take part in, of whatever is sent."""

# By the name of the operation: the kind, and which argument is the whole: -1 for the result.
_OPERATIONS: Mapping[str, tuple[str, int]] = {
    "c10d::_allgather_base_": ("all-gather", 0),
    "c10d::allgather_": ("all-gather", 0),
    "c10d::allgather_into_tensor_coalesced_": ("all-gather", 0),
    "c10d::_reduce_scatter_base_": ("reduce-scatter", 1),
    "c10d::reduce_scatter_": ("reduce-scatter", 1),
    "c10d::reduce_scatter_tensor_coalesced_": ("reduce-scatter", 1),
    "c10d::allreduce_": ("all-reduce", 0),
    "c10d::allreduce_coalesced_": ("all-reduce", 0),
    "c10d::broadcast_": ("broadcast", 0),
    "c10d::alltoall_base_": ("all-to-all", 1),
    "c10d::alltoall_": ("all-to-all", 1),
    "c10d::send": (SEND, 0),
    "_c10d_functional::all_gather_into_tensor": ("all-gather", -1),
    "_c10d_functional::all_gather_into_tensor_coalesced": ("all-gather", -1),
    "_c10d_functional::reduce_scatter_tensor": ("reduce-scatter", 0),
    "_c10d_functional::reduce_scatter_tensor_coalesced": ("reduce-scatter", 0),
    "_c10d_functional::all_reduce": ("all-reduce", 0),
    "_c10d_functional::all_reduce_": ("all-reduce", 0),
    "_c10d_functional::all_reduce_coalesced": ("all-reduce", 0),
    "_c10d_functional::broadcast": ("broadcast", 0),
    "_c10d_functional::all_to_all_single": ("all-to-all", 0),
}


class Recorder(TorchDispatchMode):
    """Notes every collective and every new memory of the operations in its block.

    Args:
        layout: how ranks are laid out.

    Attributes:
        unmarked: the kind of what is sent to one other rank without :meth:`mark`.
    """

    def __init__(self, layout: Layout) -> None:
        super().__init__()
        self.layout = layout
        self.unmarked = SEND
        self._marks: dict[int, str] = {}
        self._sums: dict[tuple[str, str, int], list[int]] = {}
        self._axes: dict[tuple[int, ...], str] = {}
        # While such a reference is kept, no other memory gets the same key.
        self._alive: dict[int, StorageWeakRef] = {}
        self._older: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Memory that is read before it was made here was there before: results may be views of it.
        for tensor in _tensors(args):
            self._keep(self._older, tensor, self._alive)
        result = func(*args, **(kwargs or {}))
        name = func._schema.name
        if name in _OPERATIONS:
            self._note(*_OPERATIONS[name], args, kwargs or {}, result)
        for tensor in _tensors(result):
            self._keep(self._alive, tensor, self._older)
        return result

    @staticmethod
    def _keep(kept: dict[int, StorageWeakRef], tensor: torch.Tensor, others: Mapping[int, StorageWeakRef]) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in kept and key not in others:
            kept[key] = StorageWeakRef(storage)

    def _note(self, kind: str, place: int, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        group = _group_of((*args, *kwargs.values()))
        ranks = dist.get_process_group_ranks(group)
        axis, number = self._axis_of(ranks), len(ranks)
        if kind == SEND:
            kind, number = self._marks.pop(_tensors(args[0])[0].untyped_storage()._cdata, self.unmarked), 2
        payload = sum(tensor.nbytes for tensor in _tensors(result if place < 0 else args[place]))
        entry = self._sums.setdefault((kind, axis, number), [0, 0, 0])
        for index, value in enumerate((1, payload, sent_bytes(kind, payload, number))):
            entry[index] += value

    def _axis_of(self, ranks: list[int]) -> str:
        key = (ranks[0], ranks[-1], len(ranks))
        if key not in self._axes:
            self._axes[key] = axis_of(ranks, self.layout)
        return self._axes[key]

    @property
    def collectives(self) -> list[Collective]:
        """What has been sent, by kind and axis."""
        return [Collective(kind, axis, ranks, *sums) for (kind, axis, ranks), sums in sorted(self._sums.items())]

    def mark(self, tensor: torch.Tensor, kind: str) -> None:
        """Say what a tensor is that is about to be sent to one other rank."""
        self._marks[local(tensor).untyped_storage()._cdata] = kind

    def storages(self) -> dict[int, int]:
        """Bytes by storage of the memory made in the block that is still there."""
        found: dict[int, int] = {}
        for key, reference in list(self._alive.items()):
            if reference.expired():
                del self._alive[key]
                continue
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            found[key] = 0 if storage is None else storage.nbytes()
        return found

    def alive(self, model: nn.Module) -> int:
        """Bytes of memory made in the block that are still there, without what stands in the model's modules."""
        own = storages_in(model)
        return sum(size for key, size in self.storages().items() if key not in own)


def axis_of(ranks: Sequence[int], layout: Layout) -> str:
    """The axes along which ranks of a group differ, joined by "+"."""
    coordinates = [coordinates_of(rank, layout) for rank in {ranks[0], ranks[-1], *ranks[:: max(len(ranks) // 64, 1)]}]
    names = [name for name, size in layout if size > 1 and len({place[name] for place in coordinates}) > 1]
    return "+".join(names) or "one rank"


def coordinates_of(rank: int, layout: Layout) -> dict[str, int]:
    """Where a rank is along each axis."""
    found: dict[str, int] = {}
    for name, size in reversed(layout):
        rank, found[name] = divmod(rank, size)
    return {name: found[name] for name, _ in layout}


def storages_in(model: nn.Module) -> dict[int, int]:
    """Bytes by storage of every tensor that stands in a module, be it a parameter or a view of one."""
    found: dict[int, int] = {}
    for module in model.modules():
        parameters = list(module._parameters.values())
        # Version 1 of FSDP keeps what it has gathered as attributes of its flat parameters.
        gathered = [value for item in parameters if item is not None for value in vars(item).values()]
        for tensor in _tensors([*parameters, *gathered, *module._buffers.values(), *vars(module).values()]):
            storage = tensor.untyped_storage()
            found[storage._cdata] = storage.nbytes()
    return found


def stored(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the memory of tensors on this rank, each memory counted once."""
    sizes: dict[int, int] = {}
    for tensor in tensors:
        storage = local(tensor).untyped_storage()
        sizes[storage._cdata] = storage.nbytes()
    return sum(sizes.values())


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [local(value)]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in _tensors(item)]
    return []


def _group_of(values: Iterable[Any]) -> Any:
    """The process group among the arguments of a collective: as an object, or by its name."""
    names = []
    for value in values:
        if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
            return dist.ProcessGroup.unbox(value)
        if isinstance(value, str):
            names.append(value)
    resolve: Any = dist.distributed_c10d._resolve_process_group
    # The operation of a reduction is a word too; the group comes after it.
    return resolve(names[-1])

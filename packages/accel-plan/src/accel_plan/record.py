"""Records every collective of a step with its bytes and mesh axis, and the memory that is alive."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from ._torch_compat import TorchDispatchMode, live_bytes, local_tensor, process_group_of, storage_id

Axes = Mapping[str, int]
"""Sizes of the mesh axes by name, innermost last."""

SEND = "send"
POINT_TO_POINT = (SEND, "activations", "gradients", "tied gradients")
"""Kinds of traffic between two ranks."""

COLLECTIVES: Mapping[str, tuple[str, int]] = {
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
"""By operator: the kind, and the index of the argument with the full data; -1 for the result."""


@dataclass(frozen=True)
class Traffic:
    """All communication of one kind over one axis, in one step of one rank."""

    # "all-gather", "reduce-scatter", "all-reduce", "broadcast" or "all-to-all"; or point to point: in a
    # pipeline "activations" (to the next stage), "gradients" (to the previous stage) and "tied gradients"
    # (between the first and the last)
    kind: str
    axis: str  # the mesh axis; axes that are flattened into one are joined by "+"
    ranks: int  # number of participating ranks
    calls: int  # number of calls
    payload: int  # bytes of the full results or inputs, over all calls
    sent: int  # bytes that this rank sends, over all calls; see :func:`sent_bytes`


def sent_bytes(kind: str, payload: int, ranks: int) -> int:
    """Return bytes that one rank sends in a ring collective, the minimum for large messages.

    With S the full bytes and n ranks: an all-gather (S: the result), a reduce-scatter (S: the input) and an all-to-all
    (S: the input) send S (n-1)/n; an all-reduce 2 S (n-1)/n; a broadcast and a point-to-point message S.
    Source: Patarasu and Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations, JPDC 69 (2009).
    """
    if ranks == 1:
        return 0
    if kind == "broadcast" or kind in POINT_TO_POINT:
        return payload
    return (2 if kind == "all-reduce" else 1) * payload * (ranks - 1) // ranks


def add_traffic(parts: Iterable[tuple[int, Iterable[Traffic]]]) -> tuple[Traffic, ...]:
    """Return the sum of several recordings, each multiplied by a factor."""
    sums: dict[tuple[str, str, int], list[int]] = {}
    for factor, recording in parts:
        for item in recording:
            entry = sums.setdefault((item.kind, item.axis, item.ranks), [0, 0, 0])
            for index, value in enumerate((item.calls, item.payload, item.sent)):
                entry[index] += factor * value
    return tuple(Traffic(*key, *values) for key, values in sorted(sums.items()))


class Recorder(TorchDispatchMode):
    """Records the collectives and the new storages of the operations in its block.

    Args:
        axes: the mesh.

    Attributes:
        default_kind: the kind of point-to-point messages whose tensor was not labelled with :meth:`label`.
    """

    def __init__(self, axes: Axes) -> None:
        super().__init__()
        self.axes = axes
        self.default_kind = SEND
        self._labels: dict[int, str] = {}
        self._traffic: list[Traffic] = []
        self._axis_names: dict[tuple[int, ...], str] = {}
        # No other storage gets the same id while it is weakly referenced.
        self._created: dict[int, StorageWeakRef] = {}
        self._existing: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # A storage that is read before it was seen existed before the block; results may be views of it.
        for tensor in tensors_in(args):
            key = storage_id(tensor)
            if key not in self._created and key not in self._existing:
                self._existing[key] = StorageWeakRef(tensor.untyped_storage())
        result = func(*args, **kwargs)
        operator = func.name()
        if operator in COLLECTIVES:
            self._record(*COLLECTIVES[operator], args, kwargs, result)
        for tensor in tensors_in(result):
            key = storage_id(tensor)
            if key not in self._created and key not in self._existing:
                self._created[key] = StorageWeakRef(tensor.untyped_storage())
        return result

    def _record(self, kind: str, index: int, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        ranks = dist.get_process_group_ranks(process_group_of((*args, *kwargs.values())))
        key = (ranks[0], ranks[-1], len(ranks))
        if key not in self._axis_names:
            self._axis_names[key] = axis_of(ranks, self.axes)
        count = len(ranks)
        if kind == SEND:
            kind, count = self._labels.pop(storage_id(tensors_in(args[0])[0]), self.default_kind), 2
        payload = sum(tensor.nbytes for tensor in tensors_in(result if index < 0 else args[index]))
        sent = sent_bytes(kind, payload, count)
        self._traffic.append(Traffic(kind, self._axis_names[key], count, 1, payload, sent))

    @property
    def traffic(self) -> tuple[Traffic, ...]:
        """The recorded communication by kind and axis."""
        return add_traffic([(1, self._traffic)])

    def label(self, tensor: torch.Tensor, kind: str) -> None:
        """Set the kind of the point-to-point message that will send this tensor."""
        self._labels[storage_id(local_tensor(tensor))] = kind

    def live_storages(self) -> dict[int, int]:
        """Return bytes by id of the storages that were created in the block and are still alive."""
        self._created = {key: reference for key, reference in self._created.items() if not reference.expired()}
        return {key: live_bytes(reference) for key, reference in self._created.items()}

    def live_bytes(self, model: nn.Module) -> int:
        """Return bytes created in the block that are still alive, without the tensors that the model's modules hold."""
        held = module_storages(model)
        return sum(size for key, size in self.live_storages().items() if key not in held)


def axis_of(ranks: Sequence[int], axes: Axes) -> str:
    """Return the axes along which the ranks of a group differ, joined by "+"."""
    sample = {ranks[0], ranks[-1], *ranks[:: max(len(ranks) // 64, 1)]}
    coordinates = [coordinates_of(rank, axes) for rank in sample]
    names = [name for name, size in axes.items() if size > 1 and len({item[name] for item in coordinates}) > 1]
    return "+".join(names) or "one rank"


def coordinates_of(rank: int, axes: Axes) -> dict[str, int]:
    """Return the coordinate of a rank on each axis."""
    coordinates: dict[str, int] = {}
    for name, size in reversed(list(axes.items())):
        rank, coordinates[name] = divmod(rank, size)
    return {name: coordinates[name] for name in axes}


def module_storages(model: nn.Module) -> dict[int, int]:
    """Return bytes by storage id of every tensor that a module holds: parameters, buffers, and other attributes."""
    sizes: dict[int, int] = {}
    for module in model.modules():
        parameters = list(module.parameters(recurse=False))
        # FSDP 1 keeps gathered parameters as attributes of its flat parameters.
        attributes = [value for parameter in parameters for value in vars(parameter).values()]
        for tensor in tensors_in([*parameters, *attributes, *module.buffers(recurse=False), *vars(module).values()]):
            sizes[storage_id(tensor)] = tensor.untyped_storage().nbytes()
    return sizes


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return bytes that tensors take on this rank; a storage that several of them share counts once."""
    local = [local_tensor(tensor) for tensor in tensors]
    return sum({storage_id(tensor): tensor.untyped_storage().nbytes() for tensor in local}.values())


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors in nested lists, tuples and mappings, as this rank holds them."""
    if isinstance(value, torch.Tensor):
        return [local_tensor(value)]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in tensors_in(item)]
    if isinstance(value, Mapping):
        return [tensor for item in value.values() for tensor in tensors_in(item)]
    return []

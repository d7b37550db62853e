"""Records the operations of a step with what their time depends on: FLOPs, bytes, messages, and who waits for whom."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.flop_counter import flop_registry

from accel_state.flops import attention_flops, grouped_product_flops

from ._torch_compat import process_group_of, schema_of, storage_id
from .record import COLLECTIVES, POINT_TO_POINT, SEND, Axes, axis_of, tensors_in

# Operations that make or change views, or memory without values.
_FREE = frozenset(
    {
        *("aten::detach", "aten::empty.memory_format", "aten::empty_strided", "aten::empty_like", "aten::new_empty"),
        *("aten::new_empty_strided", "aten::set_.source_Storage", "aten::_local_scalar_dense", "aten::lift_fresh"),
        *("_c10d_functional::wait_tensor", "aten::resize_", "aten::_unsafe_view", "aten::is_same_size"),
        *("aten::_reshape_alias", "aten::slice.Tensor", "aten::as_strided_"),
    }
)
_PRODUCTS = frozenset(
    {"mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "_grouped_mm", "convolution", "convolution_backward"}
)
_ATTENTION = ("_scaled_dot_product", "_flash_attention", "_efficient_attention")
_GATHERS_ROWS = ("aten::embedding", "aten::index_select", "aten::gather", "aten::nll_loss_forward")
PRODUCT, ATTENTION, OTHER = "matrix products", "attention", "other operations"
KINDS = (PRODUCT, ATTENTION, OTHER)
_BACKWARD = ("backward pass", "recomputation")
_COMPILED = ("forward pass", *_BACKWARD)
"""Phases of the model, to which torch.compile applies; not clipping and the optimizer."""

Place = tuple[int | None, str, str]
"""The block of the model, the phase and the module in which an operation is called."""


@dataclass(frozen=True)
class Message:
    """A collective, or a message to another stage of a pipeline."""

    kind: str
    axis: str
    ranks: tuple[int, ...]  # of the group
    payload: int  # bytes of the full results or inputs
    lane: str  # messages of one lane follow each other; lanes overlap with computation and each other
    early: bool = False  # a gather of parameters: ready as soon as the one before it was used
    after: str = ""  # the lane whose last message makes the input; empty if an operation makes it
    bucketed: bool = False  # sent together with others, as DDP does


@dataclass(frozen=True)
class Operation:
    """What the device does, or waits for, in the order of its instructions."""

    block: int | None  # the block of the model, as in memory.Event
    phase: str
    kind: str  # one of KINDS
    name: str
    module: str  # with * in place of the block's index
    dtype: str  # of a matrix product
    flops: int
    bytes: int  # read and written
    fused_bytes: int  # the same for one kernel that torch.compile makes of all operations between two products
    fused: bool  # part of the kernel of the operation before it
    waits: tuple[tuple[str, int], ...] = ()  # lanes, and how many of their messages without a wait so far
    lane: str = ""  # of messages, if it runs there rather than with the computation
    message: Message | None = None  # instead of computation
    calls: int = 1


Passes = tuple[tuple[int, tuple[Operation, ...]], ...]
"""The passes of a step and its update, each with how often it is repeated."""


@dataclass
class _Run:
    """Operations that torch.compile makes one kernel of."""

    first: int
    read: dict[int, int] = field(default_factory=dict)  # bytes by storage
    made: dict[int, int] = field(default_factory=dict)


class OperationRecorder:
    """Turns calls of operators into :class:`Operation`.

    Args:
        axes: the mesh.
        is_alive: whether a storage still exists.
        on_cpu: whether the kernels are those of CPUs.
    """

    def __init__(self, axes: Axes, is_alive: Callable[[int], bool], on_cpu: bool = False) -> None:
        self._axes = axes
        self._on_cpu = on_cpu
        self._is_alive = is_alive
        self._groups: dict[tuple[int, int, int], tuple[str, tuple[int, ...]]] = {}
        self._passes: list[tuple[int, list[Operation]]] = [(1, [])]
        self._pending: dict[int, tuple[str, int]] = {}  # lane and number of its message, by storage
        self._sent: dict[str, int] = {}
        self._waited: dict[str, int] = {}
        self._run: _Run | None = None

    def begin_pass(self, times: int) -> None:
        """Count what follows ``times`` times."""
        self._end_run()
        self._passes.append((times, []))

    def result(self) -> Passes:
        """Return what was recorded."""
        self._end_run()
        return tuple((times, tuple(items)) for times, items in self._passes if items)

    def forget(self, storage: int) -> None:
        """Forget a freed storage: another one may get its number."""
        self._pending.pop(storage, None)

    def add(self, func: Any, args: Any, kwargs: Any, result: Any, place: Place) -> None:
        """Record a call.

        Args:
            func: the operator.
            args, kwargs, result: of the call.
            place: where it happens.
        """
        name, (block, phase, module) = func.name(), place
        if name.startswith(("prim::", "profiler::")):
            return  # questions to a tensor, and marks of profilers
        given = tensors_in((args, tuple(kwargs.values())))
        if name in COLLECTIVES or name.startswith("c10d::"):
            self._end_run()
            if name in COLLECTIVES:
                self._add_message(name, args, kwargs, given, result, place)
            return
        lanes = {self._pending[key] for key in map(storage_id, given) if key in self._pending}
        if name in _FREE or _is_view(func):
            if name == "_c10d_functional::wait_tensor":
                self._add(Operation(*place[:2], OTHER, name, module, "", 0, 0, 0, False, self._wait_for(lanes)))
            elif lanes:
                lane, number = max(lanes, key=lambda item: item[1])
                self._pending.update({storage_id(tensor): (lane, number) for tensor in tensors_in(result)})
            return
        made = tensors_in(result)
        short = name.removeprefix("aten::").split(".")[0]
        kind = PRODUCT if short in _PRODUCTS else ATTENTION if short.startswith(_ATTENTION) else OTHER
        flops = _flops(func, short, args, kwargs, result, self._on_cpu) if kind != OTHER else 0
        moved = _moved(func, args, given, made)
        dtype = next((str(tensor.dtype).removeprefix("torch.") for tensor in given if tensor.is_floating_point()), "")
        side = ""
        waits: tuple[tuple[str, int], ...] = ()
        # What is made of a reduced gradient before clipping runs with the messages.
        if lanes and phase in _BACKWARD and all(lane.startswith("reduce ") for lane, _ in lanes):
            side, number = max(lanes, key=lambda item: item[1])
            self._pending.update({storage_id(tensor): (side, number) for tensor in made})
        elif name == "fsdp::all_gather_copy_in":
            side = "gather"  # the next message of parameters, whose group is not known yet
        else:
            waits = self._wait_for(lanes)
        operation = Operation(block, phase, kind, short, module, dtype, flops, moved, moved, False, waits, side)
        if kind == OTHER and not side and phase in _COMPILED:
            self._add_to_run(operation, given, made)
        else:
            self._end_run()
            self._add(operation)

    def _add(self, operation: Operation) -> None:
        self._passes[-1][1].append(operation)

    def _add_message(self, name: str, args: Any, kwargs: Any, given: Sequence[Any], result: Any, place: Place) -> None:
        (kind, index), (block, phase, module) = COLLECTIVES[name], place
        group = dist.get_process_group_ranks(process_group_of((*args, *kwargs.values())))
        key = (group[0], group[-1], len(group))
        if key not in self._groups:
            self._groups[key] = axis_of(group, self._axes), tuple(group)
        axis, ranks = self._groups[key]
        if len(ranks) == 1:
            return
        payload = sum(tensor.nbytes for tensor in tensors_in(result if index < 0 else args[index]))
        if kind == SEND:
            kind = "gradients" if phase in _BACKWARD else "activations"
        # A layer waits for the tokens of experts on ranks of a data axis, as for those of tensor parallelism.
        data = "dp" in axis and kind != "all-to-all"
        lane = f"{'gather' if kind == 'all-gather' else 'reduce'} {axis}" if data else f"exchange {axis}"
        before = {self._pending[key] for key in map(storage_id, given) if key in self._pending}
        others = [pending for pending in before if pending[0] != lane]
        after = max(others, key=lambda item: item[1])[0] if others else ""
        early = data and kind == "all-gather" and not after and phase in _COMPILED
        number = self._sent[lane] = self._sent.get(lane, 0) + 1
        # Results of functional collectives are new tensors; others write into their first argument.
        outputs = tensors_in(args[0] if name.startswith("c10d::") else result) if kind not in POINT_TO_POINT else []
        self._pending.update({storage_id(tensor): (lane, number) for tensor in outputs})
        # FSDP's all-reduce between replicas is of gradients that it has reduced before.
        bucketed = data and kind == "all-reduce" and not after and phase in _BACKWARD
        message = Message(kind, axis, ranks, payload, lane, early, after, bucketed)
        self._add(Operation(block, phase, OTHER, kind, module, "", 0, 0, 0, False, (), lane, message))

    def _wait_for(self, lanes: Iterable[tuple[str, int]]) -> tuple[tuple[str, int], ...]:
        """Messages of a lane end in their order, so waiting for one is waiting for those before it."""
        waits = []
        for lane in {lane for lane, _ in lanes}:
            number, waited = max(count for name, count in lanes if name == lane), self._waited.get(lane, 0)
            if number > waited:
                waits.append((lane, number - waited))
                self._waited[lane] = number
        for key in [key for key, (lane, number) in self._pending.items() if number <= self._waited.get(lane, 0)]:
            del self._pending[key]
        return tuple(sorted(waits))

    def _add_to_run(self, operation: Operation, given: Sequence[Any], made: Sequence[Any]) -> None:
        items = self._passes[-1][1]
        run = self._run
        if run is not None and (items[run.first].block, items[run.first].phase) != (operation.block, operation.phase):
            self._end_run()
            run = None
        if run is None or operation.waits:
            self._end_run()
            run = self._run = _Run(len(items))
        else:
            operation = replace(operation, fused=True)
        before = {storage_id(tensor) for tensor in given}
        for tensor in given:
            key = storage_id(tensor)
            if key not in run.made:
                run.read[key] = max(run.read.get(key, 0), _size(tensor))
        for tensor in made:
            key = storage_id(tensor)
            if key not in before or key in run.made:
                run.made[key] = max(run.made.get(key, 0), _size(tensor))
            else:  # written in place
                run.read[key] = run.read.get(key, 0) + _size(tensor)
        items.append(operation)

    def _end_run(self) -> None:
        run, self._run = self._run, None
        if run is None:
            return
        items = self._passes[-1][1]
        kept = sum(size for key, size in run.made.items() if self._is_alive(key))
        total = sum(run.read.values()) + kept
        for index in range(run.first, len(items)):
            items[index] = replace(items[index], fused_bytes=total if index == run.first else 0)


def _is_view(func: Any) -> bool:
    """Return True if the result shares the memory of an argument that is not written."""
    schema = schema_of(func)
    aliases = [item.alias_info for item in schema.returns]
    return bool(aliases) and all(info is not None and not info.is_write for info in aliases)


def _size(tensor: torch.Tensor) -> int:
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())


def _moved(func: Any, args: Sequence[Any], given: Sequence[torch.Tensor], made: Sequence[torch.Tensor]) -> int:
    """Return bytes that are read and written."""
    if not made:  # operations on lists of tensors, in place
        arguments = zip(schema_of(func).arguments, args, strict=False)
        made = tensors_in(
            [value for item, value in arguments if item.alias_info is not None and item.alias_info.is_write]
        )
    written = sum(map(_size, made))
    if func.name() in _GATHERS_ROWS:
        return 2 * written  # of a table, only the rows that are asked for
    if func.name() == "fsdp::all_gather_copy_in":
        return 2 * sum(map(_size, tensors_in(args[0])))  # this rank's part of the buffer
    return written + sum({storage_id(tensor): _size(tensor) for tensor in given}.values())


def _flops(func: Any, short: str, args: Any, kwargs: Mapping[str, Any], result: Any, on_cpu: bool) -> int:
    """FLOPs as torch's own counter has them; half of attention's if it is causal, since kernels skip the other half."""
    if short.startswith(_ATTENTION):
        return _attention_flops(func, short, args, kwargs, on_cpu)
    if short == "_grouped_mm":
        return grouped_product_flops(args[0].shape, args[1].shape)
    counter = flop_registry.get(func.overloadpacket)
    return 0 if counter is None else int(counter(*args, **kwargs, out_val=result))


def _attention_flops(func: Any, short: str, args: Any, kwargs: Mapping[str, Any], on_cpu: bool) -> int:
    """Return two products forward; five backward, of which one repeats the forward pass."""
    names = [argument.name for argument in schema_of(func).arguments]
    named = {**dict(zip(names, args, strict=False)), **kwargs}
    query, key, value = named["query"], named["key"], named["value"]
    products = attention_flops(query.shape, key.shape, value.shape)
    share = 1.0
    if named.get("is_causal", False):
        share = _causal_share_on_cpu(query.shape[-2], key.shape[-2]) if on_cpu else 0.5
    return int(products * share * (2.5 if "backward" in short else 1))


def _causal_share_on_cpu(queries: int, keys: int) -> float:
    """Return the share of scores that torch's kernel for CPUs computes: blocks of keys that are not all masked.

    Source: aten/src/ATen/native/cpu/FlashAttentionKernel.cpp, torch 2.6 to 2.13.
    """
    rows = 256 if queries >= 768 else 64 if queries >= 192 else 32
    scores = 0
    for first in range(0, queries, rows):
        last = min(first + rows, queries)
        scores += (last - first) * min(-(-last // 512) * 512, keys)
    return scores / (queries * keys)


def more_operations(smaller: Passes, larger: Passes, blocks: int, steps: int) -> Passes | None:
    """Return the operations of a model with ``steps`` blocks more.

    The arguments are those of :func:`.peak.more_blocks`.

    Returns:
        None if the larger model without the repeated block is not the smaller one.
    """
    if len(smaller) != len(larger):
        return None
    result = []
    for (_, few), (times, many) in zip(smaller, larger, strict=True):
        repeated = [item for item in many if _is_repeated(item, blocks)]
        if sum(item.flops for item in many) - sum(item.flops for item in repeated) != sum(item.flops for item in few):
            return None
        items: list[Operation] = []
        for middle, run in groupby(many, lambda item: _is_repeated(item, blocks)):
            items += list(run) * (1 + steps if middle else 1)
        result.append((times, (*_more_waits(few, items, steps), *_more_updates(few, many, steps))))
    return tuple(result)


def _more_waits(smaller: Sequence[Operation], larger: Sequence[Operation], steps: int) -> Iterator[Operation]:
    """Clipping and the optimizer wait for the messages of the added blocks too."""
    counts = iter([item.waits for item in smaller if item.waits and item.phase not in _COMPILED])
    for item in larger:
        if item.waits and item.phase not in _COMPILED:
            few = dict(next(counts, ()))
            waits = tuple((lane, count + steps * (count - few.get(lane, count))) for lane, count in item.waits)
            item = replace(item, waits=waits)
        yield item


def _is_repeated(item: Operation, blocks: int) -> bool:
    return item.phase in _COMPILED and item.block is not None and item.block % blocks == blocks - 2


def _more_updates(smaller: Sequence[Operation], larger: Sequence[Operation], steps: int) -> list[Operation]:
    """Return what clipping and the optimizer add for ``steps`` blocks, as one operation in each phase."""
    added = []
    for phase in dict.fromkeys(item.phase for item in larger if item.phase not in _COMPILED):
        both = [[item for item in items if item.phase == phase] for items in (smaller, larger)]
        few, many = ([item for item in items if item.message is None] for items in both)
        calls = steps * (sum(item.calls for item in many) - sum(item.calls for item in few))
        size = steps * (sum(item.bytes for item in many) - sum(item.bytes for item in few))
        if size > 0:
            added.append(replace(many[-1], calls=calls, bytes=size, fused_bytes=size, flops=0, waits=()))
        few, many = ([item for item in items if item.message is not None] for items in both)
        added += many[-1:] * (steps * (len(many) - len(few)))
    return added

"""Follows every storage of a training step: when it is made, resized and freed, and by what."""

from __future__ import annotations

import re
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from accel.core.unwrap import clean_name

from ._torch_compat import TorchDispatchMode, desugars_itself, local_tensor, process_group_of, storage_id
from .operations import OperationRecorder, Passes
from .record import COLLECTIVES, Axes, axis_of, tensors_in

PARAMETERS = "parameters"
GRADIENTS = "gradients"
OPTIMIZER = "optimizer state"
GATHERED = "gathered parameters"
REDUCTION = "gradient buffers"
ACTIVATIONS = "activations"
TEMPORARIES = "temporaries"
WHOLE_MODEL = "whole model"
"""Category of the parameters before wrapping; those that are not in the wrapped model are of other stages."""
_NAMED_BY_USE = (GATHERED, REDUCTION)
"""Categories of buffers: the operators that allocate them, such as ``empty.memory_format``, do not name their use."""
CATEGORIES = (PARAMETERS, GRADIENTS, OPTIMIZER, GATHERED, REDUCTION, ACTIVATIONS, TEMPORARIES)

FORWARD, BACKWARD, RECOMPUTATION = "forward pass", "backward pass", "recomputation"
CLIPPING, STEP = "gradient clipping", "optimizer step"

_INDEX = re.compile(r"\.(\d+)(?=\.|$)")


@dataclass(frozen=True)
class Group:
    """Tensors of one kind: blocks of a model make equal ones."""

    category: str
    operation: str  # of torch, or what holds the tensor
    module: str  # its name, with * in place of the block's index
    shape: tuple[int, ...]
    dtype: str
    bytes: int  # of one


Snapshot = Mapping[Group, int]
"""How many tensors of each group are alive."""


@dataclass(frozen=True)
class Moment:
    """A point of a step."""

    phase: str
    module: str
    operation: str

    def describe(self) -> str:
        """Return the place in the step."""
        module = f" of {self.module}" if self.module else ""
        return f"in the {self.phase}{module}, at {self.operation}"


@dataclass
class _Held:
    """A storage."""

    size: int
    operation: str
    module: str
    shape: tuple[int, ...]
    dtype: str
    category: str | None = None  # None until it is known

    @property
    def label(self) -> str:
        """What the storage is in reports: the operation that made it, or a buffer's use."""
        return self.category if self.category in _NAMED_BY_USE else self.operation

    def group(self, size: int) -> Group:
        return Group(self.category or TEMPORARIES, self.label, self.module, self.shape, self.dtype, size)


@dataclass(frozen=True)
class Event:
    """Tensors that were made (positive count) or freed in one instant."""

    block: int | None  # the block of the model whose pass it belongs to
    moment: Moment
    group: Group
    count: int


@dataclass(frozen=True)
class StepMemory:
    """A step of the optimizer, from the first micro batch to the freed gradients."""

    start: Snapshot
    events: tuple[Event, ...]


@dataclass
class _Raw:
    block: int | None
    moment: Moment
    held: _Held
    size: int
    count: int


@dataclass
class _Position:
    """Where the step is."""

    phase: str | None = None
    stack: list[str] = field(default_factory=list)  # the modules whose forward runs
    backward: str = ""  # the module whose gradients are computed
    block: int | None = None

    @property
    def module(self) -> str:
        return self.stack[-1] if self.stack else self.backward


class MemoryTracker(TorchDispatchMode):
    """Follows the storages of the operations in its block.

    Tensors that an operation makes and frees inside are not seen: they belong to the kernels of a device.
    """

    def __init__(self, axes: Axes, timed: bool = False, on_cpu: bool = False) -> None:
        super().__init__()
        self._axes = axes
        self._timed = timed
        self._on_cpu = on_cpu
        self._held: dict[int, _Held] = {}
        self._events: list[_Raw] = []
        self._start: list[tuple[_Held, int]] = []
        self._recording = False
        self.position: _Position = _Position()
        self.names: dict[int, str] = {}  # of modules, by id
        self._container = ""
        self._operations: OperationRecorder | None = None

    # -- the step, as told by the tracer -----------------------------------------------------------------------------

    def name_modules(self, model: nn.Module) -> None:
        """Know the modules of a model by name, also inside wrappers."""
        for name, module in model.named_modules():
            self.names[id(module)] = _unwrapped(name)
        lists = [module for _, module in model.named_modules() if isinstance(module, nn.ModuleList)]
        largest = max(lists, key=lambda item: sum(map(torch.numel, item.parameters())), default=None)
        self._container = "" if largest is None else self.names[id(largest)]

    def name_of(self, parameter: str) -> str:
        """Return a parameter's name, without the names of wrappers, and with * in place of a block's index."""
        return star(_unwrapped(parameter))

    def enter(self, phase: str) -> None:
        """Begin a phase of the step."""
        self.position = _Position(phase)

    def start(self) -> None:
        """Record from here on."""
        # The recording of a pipeline's split keeps the parameters of other stages for other ranks of the plan. A real
        # rank does not: benchmarks/plan_memory.py measures it.
        present = [held for held in self._held.values() if held.category != WHOLE_MODEL]
        self._start = [(held, held.size) for held in present if held.size]
        self._events, self._recording = [], True
        if self._timed:
            self._operations = OperationRecorder(self._axes, self._held.__contains__, self._on_cpu)

    def begin_pass(self, times: int) -> None:
        """Begin a forward and backward pass that happens ``times`` times in a step, or the update."""
        if self._operations is not None:
            self._operations.begin_pass(times)

    def operations(self) -> Passes:
        """Return what the device does in the step that was recorded."""
        return () if self._operations is None else self._operations.result()

    def stop(self) -> StepMemory:
        """Return what was recorded since :meth:`start`."""
        self._recording = False
        start = Counter[Group]()
        for held, size in self._start:
            start[held.group(size)] += 1
        events = []
        for raw in self._events:
            moment = raw.moment
            if raw.held.category in _NAMED_BY_USE:
                moment = Moment(moment.phase, moment.module, raw.held.label)
            events.append(Event(raw.block, moment, raw.held.group(raw.size), raw.count))
        return StepMemory(dict(start), tuple(events))

    def categorize(self, tensors: Iterable[torch.Tensor], category: str, what: str = "", where: str = "") -> None:
        """Say what tensors are for, also for the time since they were made."""
        for tensor in tensors:
            held = self._held.get(storage_id(local_tensor(tensor)))
            if held is not None:
                held.category = category
                held.operation, held.module = what or held.operation, where or held.module

    # -- what happens ------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(map(desugars_itself, types)):
            return NotImplemented
        kwargs, operation = kwargs or {}, func.name()
        if operation == "aten::_local_scalar_dense" and self.position.phase == STEP:
            return 1.0  # optimizers read the number of their steps
        result = func(*args, **kwargs)
        for tensor in tensors_in((args, tuple(kwargs.values()), result)):
            self._see(tensor, operation)
        if operation in COLLECTIVES:
            self._label_collective(COLLECTIVES[operation][0], (*args, *kwargs.values()), tensors_in((args, result)))
        if self._recording and self._operations is not None:
            place = self.position.block, self.phase, star(self.position.module)
            self._operations.add(func, args, kwargs, result, place)
        return result

    def _see(self, tensor: torch.Tensor, operation: str) -> None:
        key, storage = storage_id(tensor), tensor.untyped_storage()
        if key in self._held or tensor.device.type == "meta":
            return
        name = operation.removeprefix("aten::")
        held = _Held(0, name, star(self.position.module), tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        if self.position.phase == FORWARD:
            held.category = ACTIVATIONS
        self._held[key] = held
        weakref.finalize(storage, self._freed, key).atexit = False
        self._resized(held, storage.nbytes())

    def _freed(self, key: int) -> None:
        if self._operations is not None:
            self._operations.forget(key)
        self._resized(self._held.pop(key), 0)

    def _resized(self, held: _Held, size: int) -> None:
        if self._recording and held.category != WHOLE_MODEL:
            place = self.position
            moment = Moment(self.phase, star(place.module), held.operation)
            if held.size:
                self._events.append(_Raw(place.block, moment, held, held.size, -1))
            if size:
                self._events.append(_Raw(place.block, moment, held, size, 1))
        held.size = size

    @property
    def phase(self) -> str:
        """The phase, with the recomputation in a backward pass as one of its own."""
        phase = self.position.phase or FORWARD
        return RECOMPUTATION if phase == BACKWARD and self.position.stack else phase

    def _label_collective(self, kind: str, args: tuple[Any, ...], tensors: list[torch.Tensor]) -> None:
        """Label a collective: over data-parallel ranks parameters and gradients, else activations.

        So does an all-to-all over data-parallel ranks, which brings tokens to experts and back.
        """
        if kind == "all-to-all":
            return
        ranks = dist.get_process_group_ranks(process_group_of(args))
        if "dp" not in axis_of(ranks, self._axes):
            return
        for tensor in tensors:
            held = self._held.get(storage_id(tensor))
            if held is not None and held.category in (None, ACTIVATIONS):
                held.category = GATHERED if kind == "all-gather" else REDUCTION

    # -- where it happens --------------------------------------------------------------------------------------------

    @contextmanager
    def watching(self) -> Iterator[MemoryTracker]:
        """Follow storages and modules in the block."""
        original = torch.UntypedStorage.resize_
        pre = nn.modules.module.register_module_forward_pre_hook(self._before_forward)
        post = nn.modules.module.register_module_forward_hook(self._after_forward, always_call=True)

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            """FSDP makes and frees gathered parameters with it."""
            result, held = original(storage, size), self._held.get(storage._cdata)
            if held is not None:
                held.category = GATHERED
                self._resized(held, size)
            return result

        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]
        try:
            with self:
                yield self
        finally:
            torch.UntypedStorage.resize_ = original  # type: ignore[method-assign]
            pre.remove()
            post.remove()

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        name = self.names.get(id(module))
        place = self.position
        place.stack.append(place.module if name is None else name)
        if place.phase == FORWARD and name is not None:
            place.block = self._block_of(name, place.block)

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        place = self.position
        if not place.stack:
            return
        name = place.stack.pop()
        if place.phase != FORWARD or self.names.get(id(module)) is None:
            return
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(partial(self._backward_begins, name))
        for tensor in tensors_in(args):
            if tensor.requires_grad and not tensor.is_leaf:
                tensor.register_hook(partial(self._backward_ends, name))

    def _backward_begins(self, name: str, gradient: torch.Tensor) -> None:
        place = self.position
        # The output of a module may be that of the last module in it, whose hook was called before.
        if not place.backward.startswith(name):
            place.backward = name
        place.block = self._block_of(name, place.block)
        place.stack.clear()

    def _backward_ends(self, name: str, gradient: torch.Tensor) -> None:
        if self.position.backward.startswith(name):
            self.position.backward = name.rpartition(".")[0]

    def _block_of(self, name: str, current: int | None) -> int | None:
        """Return the index of the block that a module is or is in.

        What is outside of blocks belongs to the one before it.
        """
        if not self._container or not name.startswith(f"{self._container}."):
            return current
        return int(name[len(self._container) + 1 :].split(".")[0])


def _unwrapped(name: str) -> str:
    return clean_name(f"{name}.").removeprefix("module.").strip(".")


def star(module: str) -> str:
    """Return a module's name with * in place of its first index."""
    return _INDEX.sub(".*", module, count=1)

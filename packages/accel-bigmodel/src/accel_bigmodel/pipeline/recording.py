"""Records one run of the whole model: which modules are called in which order, and which results each one reads."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from accel_state.errors import ConfigurationError
from accel_state.operations import get_data_structure, recursively_apply
from accel_state.operations.nested import leaves

from .._torch_compat import storage_key

# A result of a unit: (number of the call, index of the tensor in its output); or INPUT and the index of an input.
Value: TypeAlias = tuple[int, int]
INPUT = -1
# What a tensor was computed from, outside the units: results of units and names of parameters and buffers.
Sources: TypeAlias = frozenset["Value | str"]

_NONE: Sources = frozenset()


@dataclass
class Recording:
    """The calls of one run of the model."""

    calls: list[str] = field(default_factory=list)  # for every call in order, the name of the unit
    # for every call, its output with a TensorInformation in place of each tensor
    outputs: list[Any] = field(default_factory=list)
    inputs: list[Sources] = field(default_factory=list)  # for every call, what its arguments were computed from
    # (next call, sources) of every tensor whose values Python code outside the units read (``.item()``)
    read: list[tuple[int, Sources]] = field(default_factory=list)
    output: Sources = _NONE  # what the model's output was computed from
    touched: set[str] = field(default_factory=set)  # parameters and buffers used outside the units
    rewritten: set[Value] = field(default_factory=set)  # results that code outside the units modifies in place


@torch.no_grad()
def record(
    model: nn.Module, forward: Callable[..., Any], units: Mapping[str, nn.Module], args: Any, kwargs: Any
) -> Recording:
    """Run ``forward(*args, **kwargs)`` of the whole model and record the calls of ``units``.

    Raises:
        ConfigurationError: a unit writes its results into one of its arguments, such as a cache.
    """
    recorder = _Recorder(model)
    recorder.follow_inputs((args, kwargs))
    with _intercepted(units, recorder), recorder:
        output = forward(*args, **kwargs)
    recorder.recording.output = recorder.sources(output)
    return recorder.recording


@contextmanager
def _intercepted(units: Mapping[str, nn.Module], recorder: _Recorder) -> Iterator[None]:
    original = {name: unit.__dict__.get("forward") for name, unit in units.items()}
    for name, unit in units.items():
        unit.forward = functools.partial(recorder.call, name, unit.forward)
    try:
        yield
    finally:
        for name, unit in units.items():
            del unit.__dict__["forward"]
            if original[name] is not None:
                unit.__dict__["forward"] = original[name]


class _Recorder(TorchDispatchMode):
    """Tracks every tensor through the code outside the units."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.recording = Recording()
        self._inside = False
        self._sources: dict[int, Sources] = {}
        self._sharing: dict[int, list[torch.Tensor]] = {}
        self._alive: list[torch.Tensor] = []
        self._written: dict[int, Sources] = {}
        self._weights: dict[int, str] = {}
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            self._weights.setdefault(storage_key(tensor), name)

    def call(self, name: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a unit and record what it reads and returns."""
        if self._inside:
            return forward(*args, **kwargs)
        before = _contents((args, kwargs))
        self.recording.calls.append(name)
        self.recording.inputs.append(self.sources((args, kwargs)))
        self._inside = True
        try:
            output = forward(*args, **kwargs)
        finally:
            self._inside = False
        for kind, tensors in _contents((args, kwargs)).items():
            if before.get(kind) != tensors:
                raise ConfigurationError(
                    f"the module {name} writes into a {kind} that it gets as an argument. In a pipeline only its own "
                    "rank would see the change. Call the model without one (for a cache of keys and values: "
                    "use_cache=False)."
                )
        self.recording.outputs.append(get_data_structure(output))
        return self._mark(output, len(self.recording.calls) - 1)

    def follow_inputs(self, inputs: Any) -> None:
        """Track the inputs of the model."""
        for number, tensor in enumerate(leaves(inputs)):
            self._remember(tensor, self._of(tensor) | {(INPUT, number)})

    def _mark(self, output: Any, call: int) -> Any:
        self._inside = True
        # A module may return its argument unchanged; the alias tells its result from the argument.
        aliased = recursively_apply(lambda tensor: tensor.detach(), output)
        self._inside = False
        for number, tensor in enumerate(leaves(aliased)):
            self._remember(tensor, frozenset({(call, number)}))
        return aliased

    def sources(self, data: Any) -> Sources:
        """Return what the tensors of nested data were computed from."""
        return _NONE.union(*(self._of(tensor) for tensor in leaves(data)))

    def _of(self, tensor: torch.Tensor) -> Sources:
        known = self._sources.get(id(tensor))
        if known is not None:
            return known
        storage = storage_key(tensor)
        weight = self._weights.get(storage)
        written = self._written.get(storage, _NONE)
        return written if weight is None else written | {weight}

    def _remember(self, tensor: torch.Tensor, sources: Sources) -> None:
        # Keeping the tensor alive keeps its id unique.
        self._alive.append(tensor)
        self._sources[id(tensor)] = sources
        self._sharing.setdefault(storage_key(tensor), []).append(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self._inside:
            self._follow(func, (args, kwargs or {}), result)
        return result

    def _follow(self, func: Any, inputs: Any, result: Any) -> None:
        sources = self.sources(inputs)
        self.recording.touched |= {source for source in sources if isinstance(source, str)}
        tensors = leaves(result)
        if not tensors and sources and not func._schema.is_mutable:
            self.recording.read.append((len(self.recording.calls), sources))
        if not func._schema.is_mutable:
            for tensor in tensors if sources else ():
                self._remember(tensor, sources)
            return
        for tensor in tensors:
            # Covers views that were created earlier and are not tracked individually.
            self._written[storage_key(tensor)] = self._written.get(storage_key(tensor), _NONE) | sources
            for alias in [*self._sharing.get(storage_key(tensor), []), tensor]:
                before = self._of(alias)
                self.recording.rewritten |= {source for source in before if not isinstance(source, str)}
                self._remember(alias, before | sources)


_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.Tensor, torch.dtype, torch.device, type, nn.Module)


def _contents(data: Any, depth: int = 5) -> dict[str, list[tuple[int, int]]]:
    """Return the tensors held by objects among the arguments, by the class of the object."""
    contents: dict[str, list[tuple[int, int]]] = {}
    objects = leaves(
        data, test_type=lambda item: not isinstance(item, (*_PLAIN, tuple, list, Mapping)) and hasattr(item, "__dict__")
    )
    for item in objects:
        versions = [(id(tensor), tensor._version) for tensor in _tensors_in(vars(item), depth)]
        contents.setdefault(type(item).__name__, []).extend(versions)
    return contents


def _tensors_in(data: Any, depth: int) -> Iterator[torch.Tensor]:
    if isinstance(data, torch.Tensor):
        yield data
        return
    if not depth or isinstance(data, _PLAIN):
        return
    values = data.values() if isinstance(data, Mapping) else data
    if not isinstance(data, (Mapping, list, tuple)):
        values = vars(data).values() if hasattr(data, "__dict__") else ()
    for value in values:
        yield from _tensors_in(value, depth - 1)

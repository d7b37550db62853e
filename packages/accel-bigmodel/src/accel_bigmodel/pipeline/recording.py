"""One run of the whole model on an example, which shows what is called in which order, and who reads whose results."""

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
from accel_state.operations import recursively_apply
from accel_state.operations.nested import leaves

# A result: the number of the call that made it, and which of its tensors it is.
Value: TypeAlias = tuple[int, int]
# What a tensor was computed from, outside the units: results of units, and names of parameters and buffers.
Sources: TypeAlias = frozenset["Value | str"]

_NONE: Sources = frozenset()


@dataclass
class Recording:
    """What a run of the model showed.

    Attributes:
        calls: the name of the unit of every call, in order.
        inputs: for every call, what its arguments were computed from.
        read: (call that follows, sources) of every tensor whose numbers the model's own code looked at (``.item()``,
            ``if x:``).
        output: what the model's output was computed from.
        touched: parameters and buffers that the code between the units uses directly.
        rewritten: results that the code between the units changes in place.
    """

    calls: list[str] = field(default_factory=list)
    inputs: list[Sources] = field(default_factory=list)
    read: list[tuple[int, Sources]] = field(default_factory=list)
    output: Sources = _NONE
    touched: set[str] = field(default_factory=set)
    rewritten: set[Value] = field(default_factory=set)


@torch.no_grad()
def record(
    model: nn.Module, forward: Callable[..., Any], units: Mapping[str, nn.Module], args: Any, kwargs: Any
) -> Recording:
    """Run the model on an example.

    Args:
        model: the whole model, with its weights.
        forward: its forward.
        units: the modules that are run whole, by name.
        args: positional arguments of the example.
        kwargs: keyword arguments of the example.

    Raises:
        ConfigurationError: a unit writes its results into an object that it got as an argument, such as a cache.
    """
    recorder = _Recorder(model)
    with _intercepted(units, recorder), recorder:
        output = forward(*args, **kwargs)
    recorder.recording.output = recorder.sources(output)
    return recorder.recording


@contextmanager
def _intercepted(units: Mapping[str, nn.Module], recorder: _Recorder) -> Iterator[None]:
    own = {name: unit.__dict__.get("forward") for name, unit in units.items()}
    for name, unit in units.items():
        unit.forward = functools.partial(recorder.call, name, unit.forward)
    try:
        yield
    finally:
        for name, unit in units.items():
            del unit.__dict__["forward"]
            if own[name] is not None:
                unit.__dict__["forward"] = own[name]


class _Recorder(TorchDispatchMode):
    """Follows every tensor through the code between the units."""

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
            self._weights.setdefault(_storage(tensor), name)

    def call(self, name: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a unit, and note what it read and made."""
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
        _check_unchanged(name, before, _contents((args, kwargs)))
        return self._mark(output, len(self.recording.calls) - 1)

    def _mark(self, output: Any, call: int) -> Any:
        self._inside = True  # making the aliases is no computation of the model
        # A module may return its argument as it is; the alias tells its result from what went in.
        aliased = recursively_apply(lambda tensor: tensor.detach(), output)
        self._inside = False
        for number, tensor in enumerate(leaves(aliased)):
            self._remember(tensor, frozenset({(call, number)}))
        return aliased

    def sources(self, data: Any) -> Sources:
        """What the tensors of nested data were computed from."""
        return _NONE.union(*(self._of(tensor) for tensor in leaves(data)))

    def _of(self, tensor: torch.Tensor) -> Sources:
        known = self._sources.get(id(tensor))
        if known is not None:
            return known
        storage = _storage(tensor)
        weight = self._weights.get(storage)
        written = self._written.get(storage, _NONE)
        return written if weight is None else written | {weight}

    def _remember(self, tensor: torch.Tensor, sources: Sources) -> None:
        # An id means something only as long as its object lives.
        self._alive.append(tensor)
        self._sources[id(tensor)] = sources
        self._sharing.setdefault(_storage(tensor), []).append(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self._inside:
            self._follow(func, (args, kwargs or {}), result)
        return result

    def _follow(self, func: Any, given: Any, result: Any) -> None:
        sources = self.sources(given)
        self.recording.touched |= {source for source in sources if isinstance(source, str)}
        made = leaves(result)
        if not made and sources and not func._schema.is_mutable:
            self.recording.read.append((len(self.recording.calls), sources))
        if func._schema.is_mutable:
            self._rewrite(made, sources)
        elif sources:
            for tensor in made:
                self._remember(tensor, sources)

    def _rewrite(self, changed: list[torch.Tensor], sources: Sources) -> None:
        for tensor in changed:
            # Views that were made before are not known one by one.
            self._written[_storage(tensor)] = self._written.get(_storage(tensor), _NONE) | sources
            for alias in [*self._sharing.get(_storage(tensor), []), tensor]:
                before = self._of(alias)
                self.recording.rewritten |= {source for source in before if not isinstance(source, str)}
                self._remember(alias, before | sources)


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.Tensor, torch.dtype, torch.device, type, nn.Module)


def _contents(data: Any, depth: int = 5) -> dict[str, list[tuple[int, int]]]:
    """The tensors that objects among the arguments hold, by the class of the object."""
    found: dict[str, list[tuple[int, int]]] = {}
    objects = leaves(
        data, test_type=lambda item: not isinstance(item, (*_PLAIN, tuple, list, Mapping)) and hasattr(item, "__dict__")
    )
    for item in objects:
        found.setdefault(type(item).__name__, []).extend(
            (id(tensor), tensor._version) for tensor in _tensors_in(vars(item), depth)
        )
    return found


def _tensors_in(data: Any, depth: int) -> Iterator[torch.Tensor]:
    if isinstance(data, torch.Tensor):
        yield data
    elif depth and isinstance(data, Mapping):
        for value in data.values():
            yield from _tensors_in(value, depth - 1)
    elif depth and isinstance(data, (list, tuple)):
        for value in data:
            yield from _tensors_in(value, depth - 1)
    elif depth and not isinstance(data, _PLAIN) and hasattr(data, "__dict__"):
        yield from _tensors_in(vars(data), depth - 1)


def _check_unchanged(name: str, before: dict[str, Any], after: dict[str, Any]) -> None:
    for kind, tensors in after.items():
        if before.get(kind) != tensors:
            raise ConfigurationError(
                f"the module {name} writes into a {kind} that it gets as an argument. In a pipeline it would do so on "
                "its own rank, and "
                "the others would not see it. Call the model in a way that needs none (for a cache of keys and "
                "values: use_cache=False)."
            )

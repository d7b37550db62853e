"""Offload of the experts of mixture-of-experts layers: only those that the router chose are read."""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from accel_state.errors import ConfigurationError

from ..offload.experts import ExpertPool, ExpertWeights
from ..offload.store import Origin, are_same, origins
from ..sizes import visiting_module
from .align import AlignDevicesHook
from .forwards import Frame

# The argument with the experts of each token, as the modules of Transformers 5 name it.
_CHOICE = "top_k_index"


def is_routed_experts(module: nn.Module) -> bool:
    """Return True if a module holds stacked weights of all experts of a layer, and is called with a router's choice.

    It has ``num_experts``, its parameters have that many items, and its forward takes ``top_k_index``.
    """
    experts = getattr(module, "num_experts", None)
    parameters = list(module.parameters(recurse=False))
    if not isinstance(experts, int) or not parameters or next(module.buffers(recurse=False), None) is not None:
        return False
    if not all(parameter.ndim >= 2 and parameter.shape[0] == experts for parameter in parameters):
        return False
    return _position(type(module).forward) is not None


def largest_visit(module: nn.Module, sizes: Mapping[str, int], classes: Collection[str] | None = None) -> int:
    """Return the most bytes that an offloaded module needs on its device at once: those of its largest layer or expert.

    Args:
        sizes: bytes of its tensors by their names in ``module``.
        classes: classes of modules that are loaded as a whole.
    """
    read_by: Counter[str] = Counter()
    for tensor, size in sizes.items():
        read_by[visiting_module(module, tensor, classes)] += size
    largest = 0
    for reader, size in read_by.items():
        layer: Any = module.get_submodule(reader)
        largest = max(largest, size // layer.num_experts if is_routed_experts(layer) else size)
    return largest


class RoutedExpertsHook(AlignDevicesHook):
    """Brings only the chosen experts of a module for which :func:`is_routed_experts` holds to its device.

    On the CPU a mapped tensor takes the place of the weights, of which only the chosen experts are touched. Otherwise,
    and if experts are kept between forwards, the weights are tensors of some experts, and the router's choice is
    renumbered for the forward. Arguments are those of the base class.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.capacity: int = 0
        """How many experts stay in memory between forwards."""
        self._pool: ExpertPool | None = None
        self._weights: dict[str, ExpertWeights] | None = None
        self._source: Any = None
        self._origins: list[Origin] = []
        self._forget()

    def _forget(self) -> None:
        self._chosen: list[int] | None = None
        self._frequent: list[int] = []
        self._places: Mapping[int, int] | None = None
        self._keeps_order = False
        self._total: int | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_pool": None, "_weights": None, "_source": None, "_origins": []}

    def set_capacity(self, experts: int) -> None:
        """Keep this many experts in memory between forwards."""
        self.capacity, self._pool = experts, None

    def expert_weights(self) -> dict[str, ExpertWeights]:
        """Return the offloaded weights, by name."""
        source, names = self.source()
        present = origins(source, names)
        if self._weights is None or self._source is not source or not are_same(self._origins, present):
            self._pool, self._source, self._origins = None, source, present
            self._weights = {
                slot.name: ExpertWeights(source, name) for slot, name in zip(self.slots, names, strict=True)
            }
        return self._weights

    def detach_hook(self, module: nn.Module) -> nn.Module:
        self._pool = self._weights = self._source = None
        return super().detach_hook(module)

    def _prepare(
        self, frame: Frame, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        # Other threads wait: the module has only the experts that this forward needs, and their number.
        self._lock.acquire()
        if self._total is not None:
            raise ConfigurationError(
                f"{type(frame.module).__name__} is called within its own forward, which has only some of its experts. "
                "Keep the layer in memory, with another device_map."
            )
        self._forget()
        self._find_choice(frame.module, args, kwargs)
        args, kwargs = super()._prepare(frame, args, kwargs)
        if self._places is not None:
            args, kwargs = self._renumber(frame.module, args, kwargs)
        return args, kwargs

    def _fills(self, module: nn.Module) -> bool:
        return True  # the weights may be those of some experts, whose shape a placeholder does not have

    def release(self, frame: Frame | None, keep_changes: bool = False) -> None:
        try:
            super().release(frame, keep_changes)
        finally:
            if frame is not None:
                if frame.values is not None:
                    if self._total is not None:
                        frame.module.__dict__["num_experts"] = self._total
                    self._forget()
                self._lock.release()

    def _find_choice(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note which experts the forward needs, unless it needs all weights."""
        if {slot.name for slot in self.slots} != {name for name, _ in module.named_parameters(recurse=False)}:
            return  # another hook places the rest
        if not all(slot.is_plain for slot in self.slots):
            return
        choice = _choice(module, args, kwargs)
        if not isinstance(choice, torch.Tensor) or not choice.numel() or choice.is_floating_point():
            return
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in _tensors(args, kwargs)):
            return  # the backward reads the weights again
        total: Any = module.num_experts
        experts, counts = torch.unique(choice, return_counts=True)
        times = dict(zip(experts.tolist(), counts.tolist(), strict=True))
        self._chosen = [expert for expert in times if expert < total]
        self._frequent = sorted(self._chosen, key=lambda expert: -times[expert])
        # The sum over the experts of a token depends on their order in the last bits, except for two.
        kind = getattr(getattr(module, "config", None), "_experts_implementation", None)
        self._keeps_order = kind in (None, "eager") and choice.shape[-1] > 2

    def onload(
        self, device: torch.device | None = None, read_anew: bool = False, into_module: bool = True
    ) -> dict[str, torch.Tensor]:
        if self._chosen is None or device is not None or read_anew:
            return super().onload(device, read_anew, into_module)
        weights = self.expert_weights()
        target = self.device or torch.device("cpu")
        values = None if self.capacity else self._in_place(weights, target)
        if values is None:
            values = self._from_pool(weights, target)
        for slot in self.slots:
            slot.fill(values[slot.name], {})
        self._users += 1
        return values

    def _in_place(self, weights: Mapping[str, ExpertWeights], device: torch.device) -> dict[str, torch.Tensor] | None:
        assert self._chosen is not None and self._stored is not None
        if device.type != "cpu" or not all(weight.is_stacked for weight in weights.values()):
            return None
        for weight in weights.values():
            weight.read_ahead(self._chosen)
        return {name: self._stored[name] for name in weights}

    def _from_pool(self, weights: Mapping[str, ExpertWeights], device: torch.device) -> dict[str, torch.Tensor]:
        assert self._chosen is not None
        if self._pool is not None and next(iter(self._pool.tensors.values())).device != device:
            self._pool = None
        if self.capacity and self._pool is None:
            self._pool = ExpertPool(weights, self.capacity, device)
        pool = self._pool
        if pool is None or len(self._chosen) > pool.capacity:
            pool = ExpertPool(weights, max(1, len(self._chosen)), device)
        pool.take(self._chosen, self._pool)
        if self._pool is not None and pool is not self._pool:
            self._pool.take(self._frequent[: self._pool.capacity], pool)
        places = [pool.places[expert] for expert in self._chosen]
        if not self._keeps_order or places == sorted(places):
            self._places = dict(pool.places)
            return dict(pool.tensors)
        self._places = {expert: index for index, expert in enumerate(self._chosen)}
        return {name: tensor[places] for name, tensor in pool.tensors.items()}

    def _renumber(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Replace the numbers of experts by their places among the weights of this forward."""
        assert self._places is not None
        total: Any = module.num_experts
        present = int(next(module.parameters(recurse=False)).shape[0])
        choice = _choice(module, args, kwargs)
        # Expert parallelism marks the experts of other processes with the number after the last.
        places = [self._places.get(expert, present) for expert in range(total + 1)]
        renumbered = torch.tensor(places, dtype=choice.dtype, device=choice.device)[choice.clamp(max=total)]
        self._total = total
        module.__dict__["num_experts"] = present
        if _CHOICE in kwargs:
            return args, {**kwargs, _CHOICE: renumbered}
        position: Any = _position(type(module).forward)
        return (*args[:position], renumbered, *args[position + 1 :]), kwargs


@functools.cache
def _position(forward: Callable[..., Any]) -> int | None:
    """Return the place of the choice among the positional arguments of a class's forward, without the module itself."""
    names = list(inspect.signature(forward).parameters)
    return names.index(_CHOICE) - 1 if _CHOICE in names else None


def _choice(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if _CHOICE in kwargs:
        return kwargs[_CHOICE]
    position = _position(type(module).forward)
    return args[position] if position is not None and position < len(args) else None


def _tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    return (value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))

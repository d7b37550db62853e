"""Bringing a module's weights and inputs to the device that it is computed on."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from accel_state.operations import find_device, send_to_device

from ..offload.offload_autograd import without_weights
from ..offload.store import PrefixedDataset
from ..tensors import (
    Location,
    TiedParamsMap,
    as_device,
    get_non_persistent_buffers,
    named_module_tensors,
    owner_of,
    set_module_tensor_to_device,
)
from .base import ModelHook

if TYPE_CHECKING:
    from ..offload.prefetch import ReadAhead


# What has taken the place of a tensor in the first of the modules that share it, for the others to take it too.
_SUCCESSORS: Any = WeakIdKeyDictionary()


class AlignDevicesHook(ModelHook):
    """Puts inputs where a module's weights are; and offloaded weights there for the time of a forward.

    Args:
        execution_device: where the module is computed. None: inputs and weights stay where they are.
        offload: the weights are kept elsewhere; the module has them only during its forward.
        io_same_device: outputs go to the device that the inputs came from.
        weights_map: where offloaded weights are found, by name. None: they are kept in memory.
        offload_buffers: buffers are offloaded too. Those that a state dict leaves out never are.
        place_submodules: what is said of the module's own weights holds for those of its submodules too.
        skip_keys: names of keyword arguments, or of items of an output, that stay where they are.
        tied_params_map: for each address of a shared weight, the copies that lie on devices now: one is used where
            there is one.
    """

    def __init__(
        self,
        execution_device: Location | None = None,
        offload: bool = False,
        io_same_device: bool = False,
        weights_map: Mapping[str, torch.Tensor] | None = None,
        offload_buffers: bool = False,
        place_submodules: bool = False,
        skip_keys: str | Sequence[str] | None = None,
        tied_params_map: TiedParamsMap | None = None,
    ) -> None:
        self.execution_device = execution_device
        self.offload = offload
        self.io_same_device = io_same_device
        self.weights_map = weights_map
        self.offload_buffers = offload_buffers
        self.place_submodules = place_submodules
        self.skip_keys = skip_keys
        self.tied_params_map = tied_params_map
        self.input_device: torch.device | None = None
        self.original_devices: dict[str, torch.device] = {}
        self.read_ahead: ReadAhead | None = None
        self.only: frozenset[str] | None = None
        """The names that the hook is about, where others are placed elsewhere."""
        self.moves_inputs = True
        self._slots: list[_Slot] = []
        self._saving: Any = None

    def __repr__(self) -> str:
        return (
            f"AlignDevicesHook(execution_device={self.execution_device}, offload={self.offload}, "
            f"io_same_device={self.io_same_device}, "
            f"offload_buffers={self.offload_buffers}, place_submodules={self.place_submodules}, "
            f"skip_keys={self.skip_keys!r})"
        )

    @property
    def device(self) -> torch.device | None:
        """The execution device, as torch knows it."""
        return None if self.execution_device is None else as_device(self.execution_device)

    # -- coming and going --------------------------------------------------------------------------------------------

    def init_hook(self, module: nn.Module) -> nn.Module:
        if self.execution_device is not None and as_device(self.execution_device).type == "meta":
            self.tied_params_map = None
        elif self.offload:
            self._offload(module)
        elif self.execution_device is not None:
            for name, _ in list(named_module_tensors(module, recurse=self.place_submodules)):
                set_module_tensor_to_device(module, name, self.execution_device, tied_params_map=self.tied_params_map)
        return module

    def _offload(self, module: nn.Module) -> None:
        tensors = self._tensors(module)
        self.original_devices = {name: tensor.device for name, tensor in tensors.items()}
        offloaded = self._names(module)
        if self.weights_map is None:
            self.weights_map = {name: tensors[name].detach().to("cpu") for name in offloaded}
        for name in tensors:
            is_mine = self.only is None or name in self.only
            if is_mine and name not in offloaded and self.execution_device is not None:
                set_module_tensor_to_device(module, name, self.execution_device)
        self._slots = [_Slot(module, name, tensors[name]) for name in offloaded]
        for slot in self._slots:
            slot.empty()

    def _names(self, module: nn.Module) -> list[str]:
        """Names of the tensors that are offloaded."""
        kept = get_non_persistent_buffers(module, self.place_submodules, fqns=True)
        tensors = self._tensors(module, self.offload_buffers)
        return [name for name in tensors if name not in kept and (self.only is None or name in self.only)]

    def _tensors(self, module: nn.Module, buffers: bool = True) -> dict[str, torch.Tensor]:
        """What the hook may be about. A shared tensor is there under each of its names, because each has to be filled."""
        recurse = self.place_submodules
        found: dict[str, torch.Tensor] = dict(module.named_parameters(recurse=recurse, remove_duplicate=False))
        return {**found, **dict(module.named_buffers(recurse=recurse, remove_duplicate=False))} if buffers else found

    def detach_hook(self, module: nn.Module) -> nn.Module:
        if self.read_ahead is not None:
            self.read_ahead.forget(self)
        for slot in self._slots:
            device = self.original_devices[slot.name]
            slot.empty()
            if device.type != "meta":
                slot.restore(self._weights()[slot.name], device)
        self._slots = []
        return module

    # -- a forward ---------------------------------------------------------------------------------------------------

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self.io_same_device:
            self.input_device = find_device([args, kwargs])
        if self._slots:
            values = self.onload(args=args)
            if torch.is_grad_enabled():
                self._saving = without_weights(values, self._read_again)
                self._saving.__enter__()
        device = self.device
        if device is None or not self.moves_inputs:
            return args, kwargs
        return send_to_device(args, device), send_to_device(kwargs, device, skip_keys=self.skip_keys)

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        self.abort_forward(module)
        if self.io_same_device and self.input_device is not None:
            output = send_to_device(output, self.input_device, skip_keys=self.skip_keys)
        return output

    def abort_forward(self, module: nn.Module) -> None:
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.__exit__(None, None, None)
        for slot in self._slots:
            slot.empty()

    def _read_again(self, name: str) -> torch.Tensor:
        value, device = self._weights()[name], self.device
        return value if device is None else self._on_device(value, device)

    def onload(self, device: torch.device | None = None, args: tuple[Any, ...] = ()) -> dict[str, torch.Tensor]:
        """Give the module its offloaded weights, on the execution device or another one, for a forward with these
        arguments.
        """
        ahead = self.read_ahead if device is None else None
        values = ahead.take(self, args) if ahead is not None else self.fetch(device)
        for slot in self._slots:
            slot.fill(values[slot.name], self._weights())
        return values

    def fetch(self, device: torch.device | None = None) -> dict[str, torch.Tensor]:
        """The offloaded weights, on the execution device or another one."""
        device, weights = device or self.device, self._weights()
        found = {}
        for slot in self._slots:
            value = weights[slot.name]
            found[slot.name] = value if device is None else self._on_device(value, device)
        return found

    def _on_device(self, value: torch.Tensor, device: torch.device) -> torch.Tensor:
        copies = (self.tied_params_map or {}).get(value.data_ptr(), {})
        shared = copies.get(device)
        return shared.detach() if shared is not None else value.to(device)

    def _weights(self) -> Mapping[str, torch.Tensor]:
        assert self.weights_map is not None
        return self.weights_map

    def source(self) -> tuple[Any, list[str]]:
        """The mapping that holds the offloaded weights, and their names in it."""
        names, weights = [slot.name for slot in self._slots], self.weights_map
        while isinstance(weights, PrefixedDataset):
            names, weights = [f"{weights.prefix}{name}" for name in names], weights.dataset
        return weights, names

    @property
    def slots(self) -> list[_Slot]:
        """The places of the offloaded weights."""
        return self._slots


class _Slot:
    """The place of one offloaded tensor in a module.

    Args:
        module: the module that has the hook.
        name: the tensor's name from there on.
        tensor: what is there now; on the meta device it stays the one that is there between forwards, so that shared
            ones stay shared.
    """

    def __init__(self, module: nn.Module, name: str, tensor: torch.Tensor) -> None:
        self.name = name
        self.owner, self.key = owner_of(module, name)
        self.is_buffer = self.key in self.owner._buffers
        self.table: dict[str, Any] = self.owner._buffers if self.is_buffer else self.owner._parameters
        self.resting = self._replaced(tensor, lambda: set_module_tensor_to_device(self.owner, self.key, "meta"))
        self.is_plain = type(self.resting) in {nn.Parameter, torch.Tensor}

    def _replaced(self, old: torch.Tensor, replace: Callable[[], None]) -> torch.Tensor:
        """What takes the place of a tensor; the same for all slots that shared the old one."""
        known = _SUCCESSORS.get(old)
        found: torch.Tensor | None = known() if known is not None else None
        if found is None:
            replace()
            found = self.table[self.key]
            _SUCCESSORS[old] = weakref.ref(found)
        self.table[self.key] = found
        return found

    def restore(self, value: torch.Tensor, device: torch.device) -> None:
        """Put values in place to stay."""
        self._replaced(
            self.resting,
            lambda: set_module_tensor_to_device(self.owner, self.key, device, value=value, dtype=value.dtype),
        )

    def empty(self) -> None:
        """Let go of the values."""
        self.table[self.key] = self.resting

    def fill(self, value: torch.Tensor, weights: Mapping[str, torch.Tensor]) -> None:
        """Put values in place."""
        if self.is_buffer:
            self.table[self.key] = value
        elif self.is_plain:
            self.table[self.key] = nn.Parameter(value, requires_grad=False)
        else:
            scales = self.name.replace("weight", "SCB")
            statistics = (
                weights[scales] if value.dtype == torch.int8 and scales != self.name and scales in weights else None
            )
            set_module_tensor_to_device(
                self.owner,
                self.key,
                value.device,
                value=value,
                dtype=value.dtype,
                fp16_statistics=statistics,
                clear_cache=False,
            )

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return self.resting.numel() * self.resting.element_size()

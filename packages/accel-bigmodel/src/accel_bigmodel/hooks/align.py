"""Moving a module's weights and inputs to the device that it runs on."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.weak import WeakIdKeyDictionary

from accel_state.errors import ConfigurationError
from accel_state.operations import find_device, send_to_device

from .._torch_compat import buffers_of
from ..offload.prefetch import Prefetcher, WeightGroup
from ..offload.store import OffloadedWeightsLoader, PrefixedDataset
from ..tensors import (
    Location,
    TiedParamsMap,
    as_device,
    get_non_persistent_buffers,
    named_module_tensors,
    owner_of,
    set_module_tensor_to_device,
    tensor_table,
)
from .base import ModelHook


@dataclass(frozen=True)
class _WeightView:
    """A view of an offloaded weight; ``offset`` counts elements from the weight's first one."""

    name: str
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


def without_weights(values: Mapping[str, torch.Tensor], read: Callable[[str], torch.Tensor]) -> Any:
    """A context in which autograd does not save the weights, which would keep the whole model until the backward."""
    ranges = [(value.data_ptr(), value.data_ptr() + value.nbytes, name) for name, value in values.items()]
    dtypes = {name: value.dtype for name, value in values.items()}

    def pack(tensor: torch.Tensor) -> Any:
        address = tensor.data_ptr()
        start, name = next(((start, name) for start, stop, name in ranges if start <= address < stop), (0, None))
        if name is None or tensor.dtype != dtypes[name]:
            return tensor
        return _WeightView(name, tensor.size(), tensor.stride(), (address - start) // tensor.element_size())

    def unpack(packed: Any) -> torch.Tensor:
        if not isinstance(packed, _WeightView):
            return packed
        value = read(packed.name)
        return value.as_strided(packed.size, packed.stride, value.storage_offset() + packed.offset)

    return saved_tensors_hooks(pack, unpack)


# The replacement of each tied tensor, so that all modules that share it get the same one.
_REPLACEMENTS: Any = WeakIdKeyDictionary()


class OffloadedConversionError(ConfigurationError, RuntimeError):
    """``half()``, ``to()`` or another conversion of a module whose weights are offloaded."""


class AlignDevicesHook(ModelHook):
    """Moves inputs to the device of a module's weights, and offloaded weights there for the duration of a forward.

    Each argument is an attribute that may be assigned at any time; the next forward, or :meth:`update`, acts on it.

    Args:
        execution_device: where the module runs. None: inputs and weights stay where they are.
        offload: the module has its weights only during its forward.
        io_same_device: move outputs to the device of the inputs.
        weights_map: offloaded weights by name. None: they are kept in host memory.
        offload_buffers: offload buffers too, except those that a state dict leaves out.
        place_submodules: apply to the weights of submodules too.
        skip_keys: names of keyword arguments, or of items of an output, that are not moved.
        tied_params_map: present copies of tied weights by data pointer and device, which are reused.
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
        self.weights_map: Mapping[str, torch.Tensor] | None = weights_map
        self.offload_buffers = offload_buffers
        self.place_submodules = place_submodules
        self.skip_keys = skip_keys
        self.tied_params_map = tied_params_map
        self.input_device: torch.device | None = None
        self.original_devices: dict[str, torch.device] = {}
        self.only: frozenset[str] | None = None
        """The names that the hook handles, if other hooks place the rest."""
        self.moves_inputs = True
        self.slots: list[_Slot] = []
        """The places of the offloaded weights, as of the last :meth:`update`."""
        self.prefetcher: Prefetcher | None = None
        self._prefetch_index = 0
        self._prefetched_map: Any = None  # the weights_map that the prefetcher reads
        self._acted_on: tuple[Any, ...] = ()  # the module, and the attributes that its slots and placement follow from
        self._autograd_context: Any = None

    def __repr__(self) -> str:
        names = ("execution_device", "offload", "io_same_device", "offload_buffers", "place_submodules", "skip_keys")
        return f"AlignDevicesHook({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"

    @property
    def device(self) -> torch.device | None:
        """The execution device as a torch device."""
        return None if self.execution_device is None else as_device(self.execution_device)

    def init_hook(self, module: nn.Module) -> nn.Module:
        device = self.device
        if device is not None and device.type == "meta":
            self.tied_params_map = None
        if not self._acted_on or self._acted_on[0] is not module:
            self.slots, self._acted_on, self.original_devices = [], (), {}
        self.update(module)
        return module

    def update(self, module: nn.Module) -> None:
        """Act on what was assigned to the attributes since the last call: offload or load weights, and move them."""
        settings = (self.execution_device, self.offload, self.offload_buffers, self.place_submodules, self.only)
        if self._acted_on and self._acted_on[0] is module and self._acted_on[1:] == settings:
            return
        self._acted_on = (module, *settings)
        device = self.device
        if device is not None and device.type == "meta":
            return  # tensors that moved there would lose their values
        if self.offload:
            self._offload(module)
            return
        self._load([slot for slot in self.slots if slot.is_empty], device)
        self.slots = []
        if device is not None:
            for name, _ in list(named_module_tensors(module, recurse=self.place_submodules)):
                set_module_tensor_to_device(module, name, device, tied_params_map=self.tied_params_map)

    def _offload(self, module: nn.Module) -> None:
        recurse = self.place_submodules
        # Tied tensors under each of their names, because each slot is filled and emptied.
        tensors: dict[str, torch.Tensor] = dict(module.named_parameters(recurse=recurse, remove_duplicate=False))
        buffers = dict(module.named_buffers(recurse=recurse, remove_duplicate=False))
        kept = get_non_persistent_buffers(module, recurse, fqns=True) if self.offload_buffers else set(buffers)
        tensors.update(buffers)
        present = {slot.name: slot for slot in self.slots}
        # Devices that a client has assigned stay.
        for name, tensor in tensors.items():
            self.original_devices.setdefault(name, tensor.device)
        handled = [name for name in tensors if self.only is None or name in self.only]
        offloaded = [name for name in handled if name not in kept]
        weights = self._weights_with(module, {name: tensors[name] for name in offloaded if name not in present})
        offloaded = [name for name in offloaded if name in weights or tensors[name].is_meta]
        self._load([slot for name, slot in present.items() if name not in offloaded and slot.is_empty], self.device)
        if self.execution_device is not None:
            for name in handled:
                if name not in offloaded:
                    set_module_tensor_to_device(module, name, self.execution_device)
        self.slots = [present.get(name) or _Slot(module, name, tensors[name]) for name in offloaded]
        self._prefetched_map = None
        for slot in self.slots:
            slot.clear()

    def _weights_with(self, module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """The weights map, after adding those tensors that it does not hold, if it is a dictionary."""
        if self.weights_map is not None and not isinstance(self.weights_map, dict):
            return self.weights_map
        held = {} if self.weights_map is None else self.weights_map
        absent = {name: value for name, value in tensors.items() if name not in held}
        empty = [name for name, value in absent.items() if value.is_meta]
        if empty:
            raise ConfigurationError(
                f"{type(module).__name__} cannot be offloaded: {', '.join(empty)} has no values, neither in the module "
                "nor in weights_map. Load the weights first, or pass them as weights_map=."
            )
        if absent or self.weights_map is None:
            self.weights_map = {**held, **{name: value.detach().to("cpu") for name, value in absent.items()}}
        return self.weights_map

    def _load(self, slots: Iterable[_Slot], device: torch.device | None) -> None:
        """Put values into the module for good."""
        for slot in slots:
            value = self._read(slot.name, None)
            assert self.weights_map is not None
            slot.restore(value, device or value.device, self.weights_map)

    def detach_hook(self, module: nn.Module) -> nn.Module:
        if self.prefetcher is not None:
            self.prefetcher.cancel()
            self.prefetcher = None
        if self.offload:
            self.update(module)
            for slot in self.slots:
                device = self.original_devices.get(slot.name)
                slot.clear()
                if slot.is_empty and device is not None and device.type != "meta":
                    self._load([slot], device)
        self.slots, self._acted_on = [], ()
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self.io_same_device:
            self.input_device = find_device([args, kwargs])
        self.update(module)
        if self.slots:
            values = self.onload()
            if torch.is_grad_enabled():
                # The backward reads the weights of this forward, whatever is assigned in between.
                read = functools.partial(self._read, device=self.device, weights=self.weights_map)
                self._autograd_context = without_weights(values, read)
                self._autograd_context.__enter__()
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
        context, self._autograd_context = self._autograd_context, None
        if context is not None:
            context.__exit__(None, None, None)
        if self.offload:
            for slot in self.slots:
                slot.clear()

    def check_conversion(self, module: nn.Module, convert: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.update(module)
        for slot in self.slots:
            slot.check_conversion(module, convert)

    def onload(self, device: torch.device | None = None, read_anew: bool = False) -> dict[str, torch.Tensor]:
        """Put the offloaded weights into the module, on ``device`` or the execution device, and return them.

        With ``read_anew`` no later forward sees what is written into them.
        """
        if self.prefetcher is not None and device is None and not read_anew:
            if self._prefetched_map is not self.weights_map:
                self.prefetch_with(self.prefetcher, self._prefetch_index)
                self.prefetcher.set_group(self._prefetch_index, self.weight_group())
            values = {**self.prefetcher.take(self._prefetch_index, self.device), **self._tied_copies(self.device)}
        else:
            values = {slot.name: self._read(slot.name, device or self.device) for slot in self.slots}
        # Not `or {}`: the truth of a PrefixedDataset is found by going through all weights of the model.
        weights = {} if self.weights_map is None else self.weights_map
        for slot in self.slots:
            slot.fill(values[slot.name], weights)
        return values

    def _read(
        self, name: str, device: torch.device | None, weights: Mapping[str, torch.Tensor] | None = None
    ) -> torch.Tensor:
        weights = self.weights_map if weights is None else weights
        assert weights is not None
        value = weights[name]
        if device is None:
            return value
        tied = (self.tied_params_map or {}).get(value.data_ptr(), {}).get(device)
        return value.to(device) if tied is None else tied.detach()

    def _tied_copies(self, device: torch.device | None) -> dict[str, torch.Tensor]:
        """The copies on a device of those weights in memory that are tied to weights which are there already."""
        if device is None or not any((self.tied_params_map or {}).values()):
            return {}
        source, names = self.source()
        held = source.state_dict if isinstance(source, OffloadedWeightsLoader) else source
        if not isinstance(held, dict):
            return {}  # reading would make another tensor
        in_memory = [(slot.name, name) for slot, name in zip(self.slots, names, strict=True) if name in held]
        copies = {slot: (self.tied_params_map or {}).get(held[name].data_ptr(), {}) for slot, name in in_memory}
        return {name: found[device].detach() for name, found in copies.items() if device in found}

    def source(self) -> tuple[Any, list[str]]:
        """The mapping that holds the offloaded weights, and their names in it."""
        names, weights = [slot.name for slot in self.slots], self.weights_map
        while isinstance(weights, PrefixedDataset):
            names, weights = [f"{weights.prefix}{name}" for name in names], weights.dataset
        return weights, names

    def prefetch_with(self, prefetcher: Prefetcher, index: int) -> None:
        """Take the weights from a prefetcher, of which they are the group with this index."""
        self.prefetcher, self._prefetch_index, self._prefetched_map = prefetcher, index, self.weights_map

    def weight_group(self) -> WeightGroup:
        """The description of the hook's offloaded weights for a :class:`Prefetcher`."""
        source, names = self.source()
        nbytes = sum(slot.placeholder.nbytes for slot in self.slots)
        is_lookup_table = isinstance(self._acted_on[0], (nn.Embedding, nn.EmbeddingBag))
        return WeightGroup([slot.name for slot in self.slots], source, names, nbytes, self.device, is_lookup_table)


class _Slot:
    """The place of an offloaded tensor in a module; between forwards it holds a placeholder on the meta device.

    A tensor that anything else puts there (an assignment, ``load_state_dict(assign=True)``, ``functional_call``)
    stays.
    """

    def __init__(self, module: nn.Module, name: str, tensor: torch.Tensor) -> None:
        self.name = name
        self.owner, self.key = owner_of(module, name)
        self.table = tensor_table(self.owner, self.key)
        self.is_buffer = self.table is buffers_of(self.owner)
        self.placeholder = self._replace(tensor, lambda: set_module_tensor_to_device(self.owner, self.key, "meta"))
        self.is_plain = type(self.placeholder) in {nn.Parameter, torch.Tensor}
        self._filled: Any = None  # what fill() has put there

    def _replace(self, old: torch.Tensor, replace: Callable[[], None]) -> torch.Tensor:
        known = _REPLACEMENTS.get(old)
        new: torch.Tensor | None = known() if known is not None else None
        if new is None:
            replace()
            new = self.table[self.key]
            if new is old:  # it was on the meta device
                return old
            _REPLACEMENTS[old] = weakref.ref(new)
        self.table[self.key] = new
        return new

    def restore(self, value: torch.Tensor, device: torch.device, weights: Mapping[str, torch.Tensor]) -> None:
        """Put values in permanently."""

        def replace() -> None:
            scales = self._scales(value, weights)
            set_module_tensor_to_device(
                self.owner, self.key, device, value=value, dtype=value.dtype, fp16_statistics=scales
            )

        self._replace(self.placeholder, replace)

    def check_conversion(self, module: nn.Module, convert: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Refuse a conversion that changes the placeholder: the values would keep their dtype and place."""
        placeholder = self.placeholder
        if not self.is_empty:
            return  # the values are here, during a forward
        try:
            with torch.no_grad():
                converted = convert(placeholder)
            is_same, wanted = converted.dtype == placeholder.dtype and converted.is_meta, converted.dtype
        except NotImplementedError:  # torch: a tensor on the meta device has no values to move
            is_same, wanted = False, placeholder.dtype
        if is_same:
            return
        change = f"converted to {wanted}" if wanted != placeholder.dtype else "moved"
        raise OffloadedConversionError(
            f"{type(module).__name__}.{self.name} is offloaded, so it cannot be {change}: the forward would use the "
            "stored values unchanged. Convert while loading, load_checkpoint_and_dispatch(..., dtype=...), or call "
            "remove_hook_from_submodules(model) and dispatch again with another device_map."
        )

    @property
    def is_empty(self) -> bool:
        """Whether the values are not in the module now."""
        return self.table[self.key] is self.placeholder

    def _scales(self, value: torch.Tensor, weights: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        """The scales of a weight in 8 bits, which bitsandbytes keeps under a name of their own."""
        name = self.name.removesuffix("weight") + "SCB"
        if self.is_plain or self.is_buffer or value.dtype != torch.int8 or not self.name.endswith("weight"):
            return None
        return weights.get(name)

    def _is_taken(self) -> bool:
        present = self.table[self.key]
        return present is not self.placeholder and present is not self._filled

    def clear(self) -> None:
        """Release the values."""
        if not self._is_taken():
            self.table[self.key] = self.placeholder
        self._filled = None

    def fill(self, value: torch.Tensor, weights: Mapping[str, torch.Tensor]) -> None:
        """Put values in for a forward."""
        if self._is_taken():
            return
        if self.is_buffer:
            self.table[self.key] = value
        elif self.is_plain:
            self.table[self.key] = nn.Parameter(value, requires_grad=False)
        else:
            scales = self._scales(value, weights)
            options: Any = {"dtype": value.dtype, "fp16_statistics": scales, "clear_cache": False}
            set_module_tensor_to_device(self.owner, self.key, value.device, value=value, **options)
        self._filled = self.table[self.key]

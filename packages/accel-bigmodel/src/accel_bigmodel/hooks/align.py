"""Moving a module's weights and inputs to the device that it runs on."""

from __future__ import annotations

import functools
import itertools
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from accel_state.errors import ConfigurationError
from accel_state.operations import find_device, send_to_device

from .._torch_compat import in_transform, untraced, version_of
from ..offload.prefetch import Prefetcher, WeightGroup
from ..offload.store import PrefixedDataset, dictionary_of, with_values
from ..placeholder import has_values
from ..tensors import (
    Location,
    TiedParamsMap,
    as_device,
    get_non_persistent_buffers,
    named_module_tensors,
    set_module_tensor_to_device,
)
from .base import ModelHook
from .forwards import FORWARDS, Frame
from .slots import OffloadedWriteError, Slot, device_before, is_here


def without_weights(
    values: Mapping[str, torch.Tensor], read: Callable[[str], torch.Tensor], version: Callable[[str], int]
) -> Any:
    """Keep autograd from saving the weights, which would keep the whole model until the backward.

    Args:
        values: the weights of a forward by name.
        read: returns one of them for the backward.
        version: returns how often it was written to until now.
    """
    ranges = [(value.data_ptr(), value.data_ptr() + value.nbytes, name) for name, value in values.items()]
    dtypes = {name: value.dtype for name, value in values.items()}

    def pack(tensor: torch.Tensor) -> Any:
        address = tensor.data_ptr()
        start, name = next(((start, name) for start, stop, name in ranges if start <= address < stop), (0, None))
        if name is None or tensor.dtype != dtypes[name]:
            return tensor
        offset = (address - start) // tensor.element_size()
        return functools.partial(view, name, tensor.size(), tensor.stride(), offset, version(name))

    def view(name: str, size: torch.Size, stride: tuple[int, ...], offset: int, writes: int) -> torch.Tensor:
        if version(name) != writes:
            raise RuntimeError(
                f"{name} is offloaded, and was modified by an inplace operation after the forward that this "
                "backward belongs to, so gradients would be wrong. Call backward() before writing into the weight."
            )
        value = read(name)
        return value.as_strided(size, stride, value.storage_offset() + offset)

    return saved_tensors_hooks(pack, lambda packed: packed if isinstance(packed, torch.Tensor) else packed())


_HOOKS: weakref.WeakSet[AlignDevicesHook] = weakref.WeakSet()


def _free_after_fork() -> None:
    """Free what threads held that exist only in the parent process."""
    for hook in _HOOKS:
        hook._lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_free_after_fork)


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
        self._stored = weights_map
        self.offload_buffers = offload_buffers
        self.place_submodules = place_submodules
        self.skip_keys = skip_keys
        self.tied_params_map = tied_params_map
        self.input_device: torch.device | None = None
        self.original_devices: dict[str, torch.device] = {}
        self.only: frozenset[str] | None = None
        """The names that the hook handles, if other hooks place the rest."""
        self.moves_inputs = True
        self.known_modules: int | None = None
        """How many modules the model had when it was offloaded, if this hook is that of the model."""
        self.slots: list[Slot] = []
        """The places of the offloaded weights, as of the last :meth:`update`."""
        self.prefetcher: Prefetcher | None = None
        self._prefetch_index = 0
        self._prefetched_map: Any = None  # the weights_map that the prefetcher reads
        self._acted_on: tuple[Any, ...] = ()  # the module, and the attributes that its slots and placement follow from
        self._start()

    def _start(self) -> None:
        _HOOKS.add(self)
        self._lock = threading.RLock()
        self._users = 0  # forwards, in all threads, that have the values in the module
        self._present: dict[str, torch.Tensor] = {}  # those values
        self._is_filled = False  # they are in the module, and not only with the threads that use them
        self._present_from: Any = None  # the weights_map that they were read from
        self._present_on: torch.device | None = None

    def __getstate__(self) -> dict[str, Any]:
        left_out = ("_lock", "_users", "_present", "_present_from", "_present_on", "_is_filled")
        return {name: value for name, value in self.__dict__.items() if name not in left_out}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start()

    brings_values = True

    def __repr__(self) -> str:
        names = ("execution_device", "offload", "io_same_device", "offload_buffers", "place_submodules", "skip_keys")
        return f"AlignDevicesHook({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"

    @property
    def weights_map(self) -> Mapping[str, torch.Tensor] | None:
        """The offloaded weights by name; where others were assigned to their places in the module, those."""
        assigned = {} if FORWARDS.frames else {slot.name: slot.assigned() for slot in self.slots}
        values = {name: value for name, value in assigned.items() if value is not None}
        return with_values(self._stored, values) if values and self._stored is not None else self._stored

    @weights_map.setter
    def weights_map(self, weights: Mapping[str, torch.Tensor] | None) -> None:
        self._stored = weights

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
            self.original_devices.setdefault(name, device_before(tensor))
        handled = [name for name in tensors if self.only is None or name in self.only]
        offloaded = [name for name in handled if name not in kept]
        weights = self._weights_with(module, {name: tensors[name] for name in offloaded if name not in present})
        offloaded = [name for name in offloaded if name in weights or not is_here(tensors[name])]
        self._load([slot for name, slot in present.items() if name not in offloaded and slot.is_empty], self.device)
        if self.execution_device is not None:
            for name in handled:
                if name not in offloaded:
                    set_module_tensor_to_device(module, name, self.execution_device)
        self.slots = [present.get(name) or Slot(self, module, name, tensors[name]) for name in offloaded]
        self._prefetched_map = None
        for slot in self.slots:
            slot.clear()

    def _weights_with(self, module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Return the weights map, after adding those tensors that it does not hold, if it is a dictionary."""
        if self._stored is not None and not isinstance(self._stored, dict):
            return self._stored
        held = {} if self._stored is None else self._stored
        absent = {name: value for name, value in tensors.items() if name not in held}
        empty = [name for name, value in absent.items() if not has_values(value)]
        if empty:
            raise ConfigurationError(
                f"{type(module).__name__} cannot be offloaded: {', '.join(empty)} has no values, neither in the module "
                "nor in weights_map. Load the weights first, or pass them as weights_map=."
            )
        if absent or self._stored is None:
            self._stored = {**held, **{name: value.detach().to("cpu") for name, value in absent.items()}}
        return self._stored

    def _load(self, slots: Iterable[Slot], device: torch.device | None) -> None:
        """Put values into the module for good."""
        for slot in slots:
            value = self.read(slot.name)
            assert self._stored is not None
            slot.restore(value, device or value.device, self._stored)

    def detach_hook(self, module: nn.Module) -> nn.Module:
        if self.prefetcher is not None:
            self.prefetcher.cancel(everything=True)
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
        if self._is_noted:
            return self._enter(module, args, kwargs)
        if self.io_same_device:
            self.input_device = find_device([args, kwargs])
        self.update(module)
        return self._moved(args, kwargs)

    @property
    def _is_noted(self) -> bool:
        """True if this thread notes the forward. A compiler traces the others as a part of the model."""
        return self.offload or (self.io_same_device and not torch.compiler.is_compiling())

    @untraced
    def _enter(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        self.update(module)
        if self.known_modules is not None and not FORWARDS.frames:
            self._check_new_modules(module)
        frame = Frame(self, module, find_device([args, kwargs]) if self.io_same_device else None)
        self.input_device = frame.input_device
        FORWARDS.frames.append(frame)
        try:
            return self._prepare(frame, args, kwargs)
        except BaseException:
            self.abort_forward(module)
            raise

    def _check_new_modules(self, model: nn.Module) -> None:
        """Refuse a module that was added to an offloaded model and has followed its placeholders to the meta device."""
        count = sum(1 for _ in model.modules())
        if count == self.known_modules:
            return
        for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
            if type(tensor) in (nn.Parameter, torch.Tensor) and not has_values(tensor):
                raise ConfigurationError(
                    f"{name} has no values: it was added after {type(model).__name__} was offloaded, and then moved to "
                    "the meta device, where the placeholders of offloaded weights are. Add adapters before the model "
                    "is offloaded: model = get_peft_model(model, config), then cpu_offload(model)."
                )
        self.known_modules = count

    def _prepare(
        self, frame: Frame, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self.slots:
            values = self.onload(into_module=self._fills(frame.module))
            frame.values = values
            # Transforms of torch.func refuse hooks on what autograd saves.
            if torch.is_grad_enabled() and not in_transform():
                # The backward reads the weights of this forward, whatever is assigned in between.
                read = functools.partial(self.read, device=self.device, weights=self._stored)
                version = functools.partial(self._count_writes, weights=self._stored)
                frame.autograd_context = without_weights(values, read, version)
                frame.autograd_context.__enter__()
        return self._moved(args, kwargs)

    def _fills(self, module: nn.Module) -> bool:
        """Return True if the values of a forward take the place of the placeholders, which costs operations least.

        In the threads of a server the placeholders stay, and answer with the values. Otherwise a thread outside of any
        forward would see the weights appear and disappear, and their device change, while it looks.
        """
        if threading.current_thread() is threading.main_thread():
            return True
        return getattr(module, "_hf_hook", self).needs_values or not all(slot.is_plain for slot in self.slots)

    def _moved(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        device = self.device
        if device is None or not self.moves_inputs:
            return args, kwargs
        # A module among the arguments has hooks of its own, or is where its caller wants it.
        modules = {key: value for key, value in kwargs.items() if isinstance(value, nn.Module)}
        others = {key: value for key, value in kwargs.items() if key not in modules}
        try:
            moved = tuple(value if isinstance(value, nn.Module) else send_to_device(value, device) for value in args)
            return moved, {**send_to_device(others, device, skip_keys=self.skip_keys), **modules}
        except NotImplementedError as error:
            raise ConfigurationError(
                "an offloaded model got a tensor on the meta device, which has no values. Was it created on "
                "model.device? Outside of a forward that is where placeholders are. Create it on the device of the "
                'inputs, or let a device_map keep the first module of the model in memory ("cpu").'
            ) from error

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        input_device = self._leave(True) if self._is_noted else self.input_device
        if self.io_same_device and input_device is not None:
            output = send_to_device(output, input_device, skip_keys=self.skip_keys)
        return output

    def abort_forward(self, module: nn.Module) -> None:
        if self._is_noted:
            self._leave(False)

    @untraced
    def _leave(self, has_succeeded: bool) -> torch.device | None:
        """Note the end of a forward, and return the device that its inputs were on."""
        frame = FORWARDS.leave(self)
        self.release(frame, keep_changes=has_succeeded)
        return self.input_device if frame is None else frame.input_device

    def release(self, frame: Frame | None, keep_changes: bool = False) -> None:
        """Release the values of a forward, unless another one needs them."""
        if frame is not None and frame.values is not None:
            self.offload_again(keep_changes)

    def offload_again(self, keep_changes: bool = False, compare: bool = False) -> None:
        """Undo one :meth:`onload`; the values leave the module with the last one.

        Args:
            keep_changes: what was written into the values lasts.
            compare: find out by comparing them; otherwise what ``weight.data`` gave is not noticed.

        Raises:
            OffloadedWriteError: something was written that cannot last.
        """
        with self._lock:
            self._users = max(0, self._users - 1)
            if self._users:
                return
            try:
                for slot in self.slots if keep_changes else ():
                    slot.keep_changes(compare)
            finally:
                self._present, self._present_from, self._is_filled = {}, None, False
                for slot in self.slots:
                    slot.clear()

    def check_conversion(self, module: nn.Module, convert: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.update(module)
        for slot in self.slots:
            slot.check_conversion(module, convert)

    def onload(
        self, device: torch.device | None = None, read_anew: bool = False, into_module: bool = True
    ) -> dict[str, torch.Tensor]:
        """Put the offloaded weights into the module, on ``device`` or the execution device, and return them.

        :meth:`offload_again` undoes it. Several threads share the values of a forward on the CPU. With ``read_anew`` no
        later forward sees what is written into them.
        """
        target = device or self.device
        with self._lock:
            on_host = target is None or target.type == "cpu"  # elsewhere each thread has a stream of its own
            is_present = on_host and self._present_from is self._stored and self._present_on == target
            if is_present and not read_anew:
                values = self._present
                if self.prefetcher is not None:
                    self.prefetcher.skip(self._prefetch_index)
            else:
                values = self._fetch(target, read_anew or device is not None)
                self._present, self._present_from, self._present_on = values, self._stored, target
                self._is_filled = False
                for slot in self.slots:
                    slot.note(values[slot.name])
            if into_module and not self._is_filled:
                # Not `or {}`: the truth of a PrefixedDataset is found by going through all weights of the model.
                weights = {} if self._stored is None else self._stored
                for slot in self.slots:
                    slot.fill(values[slot.name], weights)
                self._is_filled = True
            self._users += 1
        return values

    def _fetch(self, device: torch.device | None, read_anew: bool) -> dict[str, torch.Tensor]:
        if self.prefetcher is None or read_anew:
            return {slot.name: self.read(slot.name, device) for slot in self.slots}
        if self._prefetched_map is not self._stored:
            self.prefetch_with(self.prefetcher, self._prefetch_index)
            self.prefetcher.set_group(self._prefetch_index, self.weight_group())
        return {**self.prefetcher.take(self._prefetch_index, device), **self._tied_copies(device)}

    def read(
        self,
        name: str,
        device: torch.device | None = None,
        weights: Mapping[str, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Return a weight on a device; None: where it is offloaded."""
        weights = self._stored if weights is None else weights
        assert weights is not None
        value = weights[name]
        if device is None:
            return value
        tied = None
        if any((self.tied_params_map or {}).values()):
            tied = (self.tied_params_map or {}).get(value.data_ptr(), {}).get(device)
        return value.to(device) if tied is None else tied.detach()

    @property
    def room(self) -> int | None:
        """Bytes for weights that are kept for later reads in a forward of the model. None: those of one weight."""
        return None if self.prefetcher is None else self.prefetcher.room

    def _count_writes(self, name: str, weights: Any) -> int:
        """Return how often a parameter in host memory was written to; 0 for buffers, which forwards change."""
        if any(slot.is_buffer for slot in self.slots if slot.name == name):
            return 0
        value = self.held(name, weights)
        return 0 if value is None else version_of(value)

    def held(self, name: str, weights: Any = None) -> torch.Tensor | None:
        """Return a weight that is in host memory, where it can be written to; None if it is elsewhere."""
        source, (key,) = self.source([name], weights)
        return (dictionary_of(source) or {}).get(key)

    def hold(self, name: str, value: torch.Tensor) -> None:
        """Keep a weight in host memory from now on.

        Raises:
            OffloadedWriteError: the mapping of the weights takes none.
        """
        source, (key,) = self.source([name])
        held = dictionary_of(source)
        if held is None:
            kind = type(getattr(source, "state_dict", source)).__name__
            raise OffloadedWriteError(f"{key} was written to, but {kind} cannot hold the new values.")
        held[key] = value.detach().to("cpu")

    def prefix(self) -> str:
        """Return what comes before the names of the weights in the mapping that holds them: the module's own name."""
        return self.source([""])[1][0]

    def _tied_copies(self, device: torch.device | None) -> dict[str, torch.Tensor]:
        """Return the copies on a device of those weights in memory that are tied to weights which are there already."""
        if device is None or not any((self.tied_params_map or {}).values()):
            return {}
        source, names = self.source()
        held = dictionary_of(source) or {}  # reading from another mapping would make another tensor
        in_memory = [(slot.name, name) for slot, name in zip(self.slots, names, strict=True) if name in held]
        copies = {slot: (self.tied_params_map or {}).get(held[name].data_ptr(), {}) for slot, name in in_memory}
        return {name: found[device].detach() for name, found in copies.items() if device in found}

    def source(self, names: Iterable[str] | None = None, weights: Any = None) -> tuple[Any, list[str]]:
        """Return the mapping that holds the offloaded weights, and the names in it of all or some of them."""
        names = [slot.name for slot in self.slots] if names is None else list(names)
        weights = self._stored if weights is None else weights
        while isinstance(weights, PrefixedDataset):
            names, weights = [f"{weights.prefix}{name}" for name in names], weights.dataset
        return weights, names

    def prefetch_with(self, prefetcher: Prefetcher, index: int) -> None:
        """Take the weights from a prefetcher, of which they are the group with this index."""
        self.prefetcher, self._prefetch_index, self._prefetched_map = prefetcher, index, self._stored

    def weight_group(self) -> WeightGroup:
        """Return the description of the hook's offloaded weights for a :class:`Prefetcher`."""
        source, names = self.source()
        nbytes = sum(slot.placeholder.nbytes for slot in self.slots)
        is_lookup_table = isinstance(self._acted_on[0], (nn.Embedding, nn.EmbeddingBag))
        return WeightGroup([slot.name for slot in self.slots], source, names, nbytes, self.device, is_lookup_table)

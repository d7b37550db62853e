"""The places of offloaded weights in their modules."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from accel_state.errors import ConfigurationError

from .._torch_compat import buffers_of, version_of
from ..placeholder import Placeholder, placeholder_of, without_values
from ..tensors import owner_of, set_module_tensor_to_device, tensor_table
from .forwards import FORWARDS, OffloadingHook

# The replacement of each tied tensor, so that all modules that share it get the same one.
_REPLACEMENTS: Any = WeakIdKeyDictionary()


class OffloadedConversionError(ConfigurationError, RuntimeError):
    """``half()``, ``to()`` or another conversion of a module whose weights are offloaded."""


class OffloadedWriteError(ConfigurationError, RuntimeError):
    """Something wrote into a weight that is offloaded to files."""


class Slot:
    """The place of an offloaded tensor in a module; between forwards it holds a placeholder on the meta device.

    A tensor that anything else puts there (an assignment, ``load_state_dict(assign=True)``, ``functional_call``)
    stays.
    """

    def __init__(self, hook: OffloadingHook, module: nn.Module, name: str, tensor: torch.Tensor) -> None:
        self.hook = hook
        self.name = name
        self.owner, self.key = owner_of(module, name)
        self.table = tensor_table(self.owner, self.key)
        self.is_buffer = self.table is buffers_of(self.owner)
        self.is_plain = isinstance(tensor, Placeholder) or type(tensor) in {nn.Parameter, torch.Tensor}
        self.placeholder = _replaced(tensor, lambda: self._new_placeholder(tensor))
        self.table[self.key] = self.placeholder
        self._filled: Any = None  # what fill() has put there
        self._filled_version = 0  # of the values when they were put there

    def __str__(self) -> str:
        return f"{self.hook.prefix()}{self.name} of {type(self.owner).__name__}"

    def _new_placeholder(self, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, Placeholder):  # of an earlier offload
            tensor.stands_for = self
            return tensor
        if self.is_plain:
            return placeholder_of(tensor, self)
        set_module_tensor_to_device(self.owner, self.key, "meta")
        placeholder: torch.Tensor = self.table[self.key]
        return placeholder

    # What the placeholder asks for.

    def read(self) -> torch.Tensor:
        """Return the values on the device where the module runs, read once in a forward of the model."""
        value = FORWARDS.value_of(self.hook, self.name)
        if value is None:
            value = FORWARDS.reads.get(self)
        if value is None:
            value = self.hook.read(self.name, self.hook.device)
            if FORWARDS.frames:
                FORWARDS.keep_read(self, value, self.hook.room)
        return value

    def check_writable(self) -> torch.Tensor:
        """Return the values in host memory.

        Raises:
            OffloadedWriteError: they are in a file.
        """
        held = self.hook.held(self.name)
        if held is None:
            raise OffloadedWriteError(
                f"{self} is offloaded to files, which are never changed. Assign another tensor "
                f"(module.{self.key} = torch.nn.Parameter(...)), or bring the model into memory first: "
                'remove_hook_from_submodules(model), then model.to("cpu").'
            )
        return held

    @contextlib.contextmanager
    def writable(self) -> Iterator[torch.Tensor]:
        """Give the values in a context; what is written into them lasts.

        Raises:
            OffloadedWriteError: they are not in host memory.
        """
        present = FORWARDS.value_of(self.hook, self.name)
        if present is not None:
            yield present  # the end of the forward decides
            return
        held = self.check_writable()
        value = self.hook.read(self.name, self.hook.device)
        yield value
        if value.data_ptr() != held.data_ptr():
            held.copy_(value)
        FORWARDS.reads.clear()

    def device_in_forward(self) -> torch.device | None:
        """Return the device of the values while a forward runs in this thread; None while none does."""
        return (self.hook.device or torch.device("cpu")) if FORWARDS.frames else None

    def restore(self, value: torch.Tensor, device: torch.device, weights: Mapping[str, torch.Tensor]) -> None:
        """Put values in permanently."""

        def new() -> torch.Tensor:
            scales = self._scales(value, weights)
            set_module_tensor_to_device(
                self.owner, self.key, device, value=value, dtype=value.dtype, fp16_statistics=scales
            )
            return self.table[self.key]

        self.table[self.key] = _replaced(self.placeholder, new)

    def check_conversion(self, module: nn.Module, convert: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Refuse a conversion that changes the placeholder: the values would keep their dtype and place."""
        placeholder = without_values(self.placeholder)
        if not self.is_empty:
            return  # the values are here, during a forward
        try:
            with torch.no_grad():
                converted = convert(placeholder)
            if converted.dtype == placeholder.dtype and converted.is_meta:
                return
            change = "moved" if converted.dtype == placeholder.dtype else f"converted to {converted.dtype}"
        except NotImplementedError:  # torch: a tensor on the meta device has no values to move
            change = "moved"
        raise OffloadedConversionError(
            f"{type(module).__name__}.{self.name} is offloaded, so it cannot be {change}: the forward would use the "
            "stored values unchanged. Convert while loading, load_checkpoint_and_dispatch(..., dtype=...), or call "
            "remove_hook_from_submodules(model) and dispatch again with another device_map."
        )

    @property
    def is_empty(self) -> bool:
        """True if the values are not in the module now."""
        return self.table.get(self.key) is self.placeholder

    def _scales(self, value: torch.Tensor, weights: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        """Return the scales of a weight in 8 bits, which bitsandbytes keeps under a name of their own."""
        name = self.name.removesuffix("weight") + "SCB"
        if self.is_plain or self.is_buffer or value.dtype != torch.int8 or not self.name.endswith("weight"):
            return None
        return weights.get(name)

    def _is_taken(self) -> bool:
        # Nothing, after `bias = None`; pruning and parametrizations delete a weight, and compute it from another name.
        present = self.table.get(self.key)
        return present is None or (present is not self.placeholder and present is not self._filled)

    def assigned(self) -> torch.Tensor | None:
        """Return the values of a tensor that something else has put in this place; None if nothing has."""
        present = self.table.get(self.key)
        return present.detach() if present is not None and self._is_taken() and is_here(present) else None

    def clear(self) -> None:
        """Release the values."""
        if not self._is_taken():
            self.table[self.key] = self.placeholder
        self._filled = None

    def note(self, value: torch.Tensor) -> None:
        """Note the values of a forward whose thread has them, while the placeholder stays."""
        self._filled, self._filled_version = value, version_of(value)

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
        # Not of the value: in a transform of torch.func this is a wrapper, which counts from 0.
        self._filled_version = version_of(self._filled)

    def keep_changes(self, compare: bool) -> None:
        """Keep what was written into the values since they were put in.

        Raises:
            OffloadedWriteError: it wrote into a parameter in a file.
        """
        value = self._filled
        if not self.is_plain or value is None:
            return
        is_changed = version_of(value) != self._filled_version
        # Batch norm changes its statistics without counting it.
        if not (is_changed or compare or (self.is_buffer and self.owner.training)):
            return
        held = self.hook.held(self.name)
        if held is not None:
            if held.data_ptr() != value.data_ptr():
                held.copy_(value.detach())
        elif self.is_buffer:
            self.hook.hold(self.name, value)
        elif is_changed or (compare and not _are_equal(value, self.hook.read(self.name, value.device))):
            raise OffloadedWriteError(
                f"{self} was written to, but it is offloaded to files, so the change is lost. Keep this module in "
                "memory, with another device_map or cpu_offload, or assign what it shall be to "
                "module._hf_hook.weights_map."
            )


def is_here(tensor: torch.Tensor) -> bool:
    """Return True if a tensor itself has values."""
    return not without_values(tensor).is_meta


def _are_equal(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return True if two tensors have the same bits."""
    bits = [tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in (first, second)]
    return torch.equal(*bits)


def device_before(tensor: torch.Tensor) -> torch.device:
    """Return where a tensor is, or was before it was offloaded."""
    if not isinstance(tensor, Placeholder):
        return tensor.device
    slot: Any = tensor.stands_for
    return slot.hook.original_devices.get(slot.name, torch.device("meta"))


def _replaced(old: torch.Tensor, make: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Return the one replacement of a tensor that several modules may share."""
    known = _REPLACEMENTS.get(old)
    new: torch.Tensor | None = known() if known is not None else None
    if new is None:
        new = make()
        if new is not old:
            _REPLACEMENTS[old] = weakref.ref(new)
    return new

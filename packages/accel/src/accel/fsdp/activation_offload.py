"""Inputs of checkpointed blocks in host memory until the backward pass needs them.

Copies run on a stream of their own: to the host while the next blocks compute, and back one block ahead of the one that
is computed again. On a device without streams they are synchronous; on the CPU there is nothing to move.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from accel_state import devices
from accel_state.errors import ConfigurationError

from .._torch_compat import checkpointed_module


class _Offloaded:
    """A tensor in host memory, and on the device while its block is computed again."""

    def __init__(self, copies: _Copies, tensor: torch.Tensor) -> None:
        self._copies = copies
        self._back: torch.Tensor | None = None
        self._source: torch.Tensor | None = tensor
        self._version = tensor._version
        module, stream = copies.module, copies.stream
        self._host = torch.empty_like(tensor, device="cpu", pin_memory=stream is not None, requires_grad=False)
        if stream is None:
            self._host.copy_(tensor.detach())
            return
        stream.wait_stream(module.current_stream(copies.device))
        with module.stream(stream):
            self._host.copy_(tensor.detach(), non_blocking=True)
        self._copied = module.Event()
        self._copied.record(stream)

    def release(self) -> bool:
        """Let later work wait for the copy to the host; False if the tensor was changed while it was copied."""
        source, self._source = self._source, None
        if source is not None and self._copies.stream is not None:
            self._copies.module.current_stream(self._copies.device).wait_event(self._copied)
        return source is None or source._version == self._version

    def fetch(self) -> None:
        """Start copying it back, after the copy to the host, which is earlier on the same stream."""
        if self._back is not None:
            return
        module, stream = self._copies.module, self._copies.stream
        if stream is None:
            self._back = self._host.to(self._copies.device)
            return
        with module.stream(stream):
            self._back = self._host.to(self._copies.device, non_blocking=True)
        self._arrival = module.Event()
        self._arrival.record(stream)

    def take(self) -> torch.Tensor:
        """Return the tensor on the device, for work that the current stream gets from now on."""
        self.fetch()
        tensor, self._back = self._back, None
        assert tensor is not None
        if self._copies.stream is not None:
            current = self._copies.module.current_stream(self._copies.device)
            current.wait_event(self._arrival)
            tensor.record_stream(current)
        return tensor


class _Copies:
    """The copies of a device, and the blocks whose inputs are in host memory, in the order of their forward."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        known = devices.of(device)
        self.module: Any = None if known is None else known.streams()
        self.stream: Any = None if self.module is None else self.module.Stream(device=device)
        self.blocks: list[weakref.ref[_Block]] = []

    def before(self, block: _Block) -> _Block | None:
        """Return the block that the backward pass reaches after this one; blocks behind it are forgotten."""
        while self.blocks and self.blocks.pop()() is not block:
            pass
        return self.blocks[-1]() if self.blocks else None


class _Block:
    """The inputs of one call of a block."""

    def __init__(self) -> None:
        self.tensors: list[_Offloaded] = []
        self._copies: _Copies | None = None

    def pack(self, tensor: torch.Tensor) -> Any:
        """Return what is kept of a saved tensor; those that are not in a device's memory stay as they are."""
        if tensor.device.type == "cpu" or type(tensor) is not torch.Tensor or not tensor.numel():
            return tensor
        copies = _copies_of(tensor.device)
        if self._copies is None:
            self._copies = copies
            copies.blocks.append(weakref.ref(self))
        offloaded = _Offloaded(copies, tensor)
        self.tensors.append(offloaded)
        return self, offloaded

    def reach(self) -> None:
        """Fetch all inputs, and those of the block that comes next in the backward pass."""
        copies, self._copies = self._copies, None
        if copies is not None:
            for block in (self, copies.before(self)):
                for tensor in block.tensors if block is not None else ():
                    tensor.fetch()


@functools.cache
def _copies_of(device: torch.device) -> _Copies:
    return _Copies(device)


def offload_inputs(checkpointed: nn.Module) -> nn.Module:
    """Keep what a checkpointed module saves for its recomputation in host memory, in place; returns it."""
    forward = checkpointed.forward

    @functools.wraps(forward)
    def offloading(*args: Any, **kwargs: Any) -> Any:
        block = _Block()
        with saved_tensors_hooks(block.pack, _unpack):
            output = forward(*args, **kwargs)
        if not all([tensor.release() for tensor in block.tensors]):
            raise ConfigurationError(
                f"a {type(checkpointed_module(checkpointed) or checkpointed).__name__} changes its input in place "
                "while that is copied to host memory. Write x = x + y instead of x += y, or turn the offloading of "
                "checkpointed inputs off."
            )
        return output

    checkpointed.forward = offloading
    return checkpointed


def _unpack(packed: Any) -> torch.Tensor:
    if isinstance(packed, torch.Tensor):
        return packed
    block, offloaded = packed
    block.reach()
    tensor: torch.Tensor = offloaded.take()
    return tensor

"""The forwards of offloaded modules that run in each thread."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn


class OffloadingHook(Protocol):
    """A hook that brings the weights of a module for its forward."""

    original_devices: dict[str, torch.device]

    @property
    def device(self) -> torch.device | None:
        """The device where the module runs. None: where its weights are."""

    @property
    def room(self) -> int | None:
        """Bytes for weights that are kept for later reads in a forward of the model. None: those of one weight."""

    def read(self, name: str, device: torch.device | None = None) -> torch.Tensor:
        """Return a weight on a device; None: where it is offloaded."""

    def held(self, name: str) -> torch.Tensor | None:
        """Return a weight that is in host memory; None if it is elsewhere."""

    def hold(self, name: str, value: torch.Tensor) -> None:
        """Keep a weight in host memory from now on."""

    def prefix(self) -> str:
        """Return what comes before the names of the weights in the mapping that holds them."""


@dataclass
class Frame:
    """A forward of a hook's module in one thread."""

    hook: OffloadingHook
    module: nn.Module
    input_device: torch.device | None = None
    autograd_context: Any = None
    values: dict[str, torch.Tensor] | None = None


class _Thread(threading.local):
    """The forwards that run in this thread, the innermost last."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        # What modules have read of the slots of others in this forward of the model.
        self.reads: OrderedDict[object, torch.Tensor] = OrderedDict()

    def keep_read(self, slot: object, value: torch.Tensor, room: int | None) -> None:
        """Keep a value for the next read, and release the oldest ones beyond ``room`` bytes, but not this one."""
        self.reads[slot] = value
        while len(self.reads) > 1 and sum(held.nbytes for held in self.reads.values()) > (room or 0):
            self.reads.popitem(last=False)

    def value_of(self, hook: OffloadingHook, name: str) -> torch.Tensor | None:
        """Return a weight that a forward of this thread has; None if none has it."""
        for frame in reversed(self.frames):
            if frame.hook is hook and frame.values is not None:
                return frame.values.get(name)
        return None

    def leave(self, hook: OffloadingHook) -> Frame | None:
        """Remove the innermost forward of a hook; those within it stay, since clients end hooks in any order."""
        place = next((place for place in reversed(range(len(self.frames))) if self.frames[place].hook is hook), None)
        if place is None:
            return None
        for frame in reversed(self.frames[place:]):  # contexts end in reverse order
            context, frame.autograd_context = frame.autograd_context, None
            if context is not None:
                context.__exit__(None, None, None)
        frame = self.frames.pop(place)
        if not self.frames:
            self.reads.clear()
        return frame


FORWARDS = _Thread()

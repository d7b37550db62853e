"""The forwards of offloaded modules that run in each thread."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from .align import AlignDevicesHook
    from .slots import Slot


@dataclass
class Frame:
    """A forward of a hook's module in one thread."""

    hook: AlignDevicesHook
    module: nn.Module
    input_device: torch.device | None = None
    autograd_context: Any = None
    holds_values: bool = False
    on_release: Callable[[Frame], None] | None = None

    def leave_autograd(self) -> None:
        """Leave the context that autograd is in, if it is in one."""
        context, self.autograd_context = self.autograd_context, None
        if context is not None:
            context.__exit__(None, None, None)


class _Reads:
    """Values that modules have read of other modules in this forward of the model, as many as there is room for."""

    def __init__(self) -> None:
        self._values: OrderedDict[Slot, torch.Tensor] = OrderedDict()

    def get(self, slot: Slot) -> torch.Tensor | None:
        """Return the value that was read of a slot."""
        return self._values.get(slot)

    def keep(self, slot: Slot, value: torch.Tensor) -> None:
        """Keep a value for the next read, and release the oldest ones beyond the room of the model's prefetcher."""
        prefetcher = slot.hook.prefetcher
        room = value.nbytes if prefetcher is None else max(prefetcher.room, value.nbytes)
        self._values[slot] = value
        while sum(held.nbytes for held in self._values.values()) > room:
            self._values.popitem(last=False)

    def clear(self) -> None:
        """Release all values."""
        self._values.clear()


class _Thread(threading.local):
    """The forwards that run in this thread, the innermost last."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.reads = _Reads()

    def leave(self, hook: AlignDevicesHook) -> Frame | None:
        """Remove the innermost forward of a hook, and those within it that nobody ended."""
        place = next((place for place in reversed(range(len(self.frames))) if self.frames[place].hook is hook), None)
        if place is None:
            return None
        frame, *inner = self.frames[place:]
        for other in reversed([frame, *inner]):
            other.leave_autograd()  # contexts end in reverse order
        # The next hooks of the same module end after this one.
        self.frames[place:] = [other for other in inner if other.module is frame.module]
        for other in inner:
            if other.module is not frame.module:
                other.hook.release(other)
        if not self.frames:
            self.reads.clear()
        return frame


FORWARDS = _Thread()

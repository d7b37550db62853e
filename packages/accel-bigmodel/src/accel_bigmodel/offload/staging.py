"""Copying weights to an accelerator through pinned host memory, on a stream of their own."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from accel_state import devices

# The largest size of each of the two pinned buffers: enough for the full bandwidth of a bus, small next to the weights.
_BUFFER_BYTES = 64 * 2**20
# Weights of a group begin at multiples of this in their block of device memory, like separate allocations.
_ALIGNMENT = 512


class StagedCopies:
    """Copies weights to a device; while one pinned buffer is copied to the device, the other one is filled.

    On a device without streams the copies are synchronous, and the buffers are not pinned.

    Args:
        device: the device.
        largest: the most bytes that are copied at once; smaller models need smaller buffers.
    """

    def __init__(self, device: torch.device, largest: int) -> None:
        self.device = device
        self._size = max(1, min(largest, _BUFFER_BYTES))
        known = devices.of(device)
        self._module: Any = None if known is None else known.streams()
        self._stream = None if self._module is None else self._module.Stream(device=device)
        self._buffers: list[torch.Tensor | None] = [None, None]
        self._copied: list[Any] = [None, None]  # events after the last copy from each buffer
        self._current, self._used = 0, 0
        self._lock = threading.Lock()  # the prefetching thread and the main thread

    def send(self, values: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], Any]:
        """Start copying weights to the device.

        Returns:
            The weights on the device, which are views of one block of memory, and the event of their arrival (None:
            they have arrived).
        """
        current, on_stream = None, contextlib.nullcontext()
        if self._module is not None:
            current, on_stream = self._module.current_stream(self.device), self._module.stream(self._stream)
        with self._lock, on_stream:
            plain = {
                name: value.detach() for name, value in values.items() if type(value) in (torch.Tensor, nn.Parameter)
            }
            offsets, total = {}, 0
            for name, value in plain.items():
                offsets[name] = total
                total += -(-value.nbytes // _ALIGNMENT) * _ALIGNMENT
            block = torch.empty(total, dtype=torch.uint8, device=self.device)
            self._follow(current, [value for value in values.values() if value.device == block.device])
            sent = {}
            for name, value in values.items():
                if name not in plain:  # quantized: its class knows how to move it
                    sent[name] = value.to(self.device, non_blocking=True)
                    continue
                target = block[offsets[name] : offsets[name] + value.nbytes]
                if value.numel():
                    self._copy(plain[name].contiguous().reshape(-1).view(torch.uint8), target)
                sent[name] = target.view(value.dtype).view(value.shape)
            return sent, self._event()

    def receive(self, values: Mapping[str, torch.Tensor], arrival: Any) -> Any:
        """Let the current stream wait for weights that were sent.

        Returns:
            An event after all work that was submitted before; None on a device without streams.
        """
        if self._module is None:
            return None
        stream = self._module.current_stream(self.device)
        earlier = self._module.Event()
        earlier.record(stream)
        stream.wait_event(arrival)
        for tensor in _tensors_in(list(values.values())):
            tensor.record_stream(stream)
        return earlier

    def _follow(self, stream: Any, sources: list[torch.Tensor]) -> None:
        """Read weights that are on the device itself behind the work of a stream, and before their memory is reused."""
        if self._stream is not None and sources:
            self._stream.wait_stream(stream)
            for tensor in _tensors_in(sources):
                tensor.record_stream(self._stream)

    def _event(self) -> Any:
        if self._module is None:
            return None
        event = self._module.Event()
        event.record(self._stream)
        return event

    def _copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        if source.device.type != "cpu" or source.is_pinned():
            target.copy_(source, non_blocking=True)
            return
        position = 0
        while position < source.numel():
            if self._used == self._size:
                self._copied[self._current] = self._event()
                self._current, self._used = 1 - self._current, 0
            buffer = self._buffer()
            count = min(source.numel() - position, self._size - self._used)
            piece = buffer[self._used : self._used + count]
            piece.copy_(source[position : position + count])
            target[position : position + count].copy_(piece, non_blocking=True)
            self._used += count
            position += count

    def _buffer(self) -> torch.Tensor:
        """Return the current buffer; one that is used from its beginning has been copied to the device entirely."""
        buffer, copied = self._buffers[self._current], self._copied[self._current]
        if buffer is None:
            buffer = torch.empty(self._size, dtype=torch.uint8, pin_memory=self._module is not None)
            self._buffers[self._current] = buffer
        if copied is not None:
            copied.synchronize()
            self._copied[self._current] = None
        return buffer


def _tensors_in(value: Any, seen: set[int] | None = None) -> Iterator[torch.Tensor]:
    """Return the tensors with memory that a value consists of, with those that hold a quantized weight's scales."""
    seen = set() if seen is None else seen
    if id(value) in seen or isinstance(value, nn.Module):
        return
    seen.add(id(value))
    if isinstance(value, (list, tuple)):
        inner = list(value)
    elif hasattr(value, "__tensor_flatten__"):  # made of other tensors, without memory of its own
        inner = [getattr(value, name) for name in value.__tensor_flatten__()[0]]
    elif isinstance(value, dict):
        inner = list(value.values())
    else:
        if isinstance(value, torch.Tensor):
            yield value
        inner = list(getattr(value, "__dict__", {}).values())
    for item in inner:
        yield from _tensors_in(item, seen)

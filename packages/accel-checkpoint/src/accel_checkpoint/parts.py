"""The files of a checkpoint, before they are written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from accel_state.safetensors_writer import write_safetensors

from .shared_memory import SharedMemory
from .staging import HostCopies


@dataclass(frozen=True)
class Part:
    """One file of a checkpoint, in torch's format unless a subclass writes another one."""

    name: str  # path of the file, relative to the checkpoint
    value: Any  # the contents
    what: str = ""  # whose state this is, for messages. If set, saving fails where loading the file would run code
    each_rank: bool = False  # every rank writes a file of its own; otherwise the main process writes one for all
    is_small: bool = False  # with many ranks, those of all ranks are put into one file

    # Called as `write_value(value, target)`: the contents, or a copy of them, and an object with `write`.
    write_value: ClassVar[Callable[..., Any]] = staticmethod(torch.save)


class WeightsPart(Part):
    """The weights of a model in the safetensors format."""

    write_value: ClassVar[Callable[..., Any]] = staticmethod(write_safetensors)


class TextPart(Part):
    """A text, such as JSON."""

    def write_value(self, value: str, target: Any) -> None:
        target.write(value.encode())


def copied_parts(parts: Sequence[Part], memory: SharedMemory) -> list[Part]:
    """Return the same files of copies in host memory, whose former contents may be overwritten."""
    memory.start()
    copies = HostCopies(memory)
    copied = [replace(part, value=copies.copy(part.value)) for part in parts]
    memory.finish()
    return copied

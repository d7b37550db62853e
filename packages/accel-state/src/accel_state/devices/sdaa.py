"""Tecorigin SDAA accelerators, through torch_sdaa: https://github.com/Tecorigin/torch_sdaa"""

from __future__ import annotations

from typing import ClassVar

from ..enums import DistributedType
from .base import Device


class SdaaDevice(Device):
    """Tecorigin accelerators: torch_sdaa adds ``torch.sdaa`` with the functions of ``torch.cuda``."""

    name = "sdaa"
    collective_backend = "tccl"
    visible_devices_variable: ClassVar[str | None] = "SDAA_VISIBLE_DEVICES"
    distributed_type = DistributedType.MULTI_SDAA
    vendor_package: ClassVar[str | None] = "torch_sdaa"
    out_of_memory_messages: ClassVar[tuple[str, ...]] = ("SDAA out of memory",)

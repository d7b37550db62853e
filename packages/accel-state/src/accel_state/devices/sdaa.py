"""Tecorigin SDAA accelerators, through torch_sdaa: https://github.com/Tecorigin/torch_sdaa"""

from __future__ import annotations

from ..enums import DistributedType
from .base import Device


class SdaaDevice(Device):
    """Tecorigin accelerators: torch_sdaa adds ``torch.sdaa`` with the functions of ``torch.cuda``."""

    name = "sdaa"
    collective_backend = "tccl"
    visible_devices_variable = "SDAA_VISIBLE_DEVICES"
    distributed_type = DistributedType.MULTI_SDAA
    vendor_package = "torch_sdaa"
    out_of_memory_messages = ("SDAA out of memory",)
